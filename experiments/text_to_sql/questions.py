"""Questions about small random schemas, without limit: a source of problems for text-to-SQL.

Some cannot be answered, since no table has what they ask for; the right answer is then to abstain. Training and
held-out problems are apart by their schemas, of which examples in a prompt are training ones.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, override

import numpy as np

from axlearn_like.input.shuffle import derived_seed
from experiments.text_to_sql.prompts import Example, masked
from experiments.text_to_sql.schemas import NUMBERS, Column, Schema, Table, random_schema
from rl.environments.retrieval.bm25 import BM25
from rl.protocol.messages import Problem
from rl.tasks.heldout import question_digest
from rl.tasks.source import ProblemSource

__all__ = ["ABSTAIN", "LAST_LINE", "SqlQuestions"]

ABSTAIN = "null"
LAST_LINE = r"(?m)^(.+)$"
_VALUES = ("north", "south", "east", "west")
_ATTEMPTS = 16


class Asked(NamedTuple):
    """A question about a schema, the query that it tempts to, and what a query needs to find out first."""

    schema: Schema
    question: str
    query: str
    steps: str
    answerable: bool  # False: a column of the query is not there

    def answer(self, steps: bool) -> str:
        """Return the query, or `null`, behind the steps."""
        query = self.query if self.answerable else ABSTAIN
        return f"{self.steps}\n{query}" if steps else query


def _all(table: Table, rng: np.random.Generator) -> tuple[str, str]:
    return f"How many {table.thing}?", f"SELECT COUNT(*) FROM {table.name}"


def _extreme(table: Table, rng: np.random.Generator) -> tuple[str, str]:
    word, function = (("highest", "MAX"), ("lowest", "MIN"), ("mean", "AVG"))[rng.integers(3)]
    column = _pick(rng, table.of_kind("INTEGER"))
    return f"The {word} {column.thing} of {table.thing}?", f"SELECT {function}({column.name}) FROM {table.name}"


def _compared(table: Table, rng: np.random.Generator) -> tuple[str, str]:
    word, sign = (("over", ">"), ("under", "<"))[rng.integers(2)]
    column, number = _pick(rng, table.of_kind("INTEGER")), rng.integers(10, 90)
    question = f"How many {table.thing} with {column.thing} {word} {number}?"
    return question, f"SELECT COUNT(*) FROM {table.name} WHERE {column.name} {sign} {number}"


def _equal(table: Table, rng: np.random.Generator) -> tuple[str, str]:
    column, value = _pick(rng, table.of_kind("TEXT")), _VALUES[rng.integers(len(_VALUES))]
    question = f"How many {table.thing} with {column.thing} {value}?"
    return question, f"SELECT COUNT(*) FROM {table.name} WHERE {column.name} = '{value}'"


def _grouped(table: Table, rng: np.random.Generator) -> tuple[str, str]:
    number, text = _pick(rng, table.of_kind("INTEGER")), _pick(rng, table.of_kind("TEXT"))
    question = f"The highest {number.thing} of {table.thing} by {text.thing}?"
    return question, f"SELECT {text.name}, MAX({number.name}) FROM {table.name} GROUP BY {text.name}"


Kind = Callable[[Table, np.random.Generator], tuple[str, str]]
_KINDS: tuple[Kind, ...] = (
    _all,
    _extreme,
    _compared,
    _equal,
    _grouped,
)
_EXAMPLES = 512


class SqlQuestions(ProblemSource):
    """Problems with the fields `schema` (CREATE TABLE statements) and `query` of their rows; the answer is the query.

    The prompt has names of tables and columns, and no value of any database; nor have the examples in it.
    """

    class Config(ProblemSource.Config):
        tables: int = 2
        unanswerable: float = 0.2  # share of questions about a column that no table has
        shots: int = 0  # examples before the question, whose questions are the nearest, of other schemas
        # Answers begin with a line that names tables and columns (a chain of thought), the query is the last line:
        # `SqlVerifier.Config(field="query", answer_pattern=LAST_LINE)`.
        steps: bool = False

        @property
        @override
        def title(self) -> str:
            return self.label or "text_to_sql"

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("tables", 1 <= self.tables <= 4, "1 to 4")
            self.require("unanswerable", 0 <= self.unanswerable < 1, "0 up to 1")
            self.require_least(0, "shots")

    def __init__(self, cfg: Config, *, seed: int):
        super().__init__(cfg)
        self._cfg, self._seed = cfg, seed
        self._heldout_every = 0

    @override
    def split(self, heldout_every: int) -> None:
        self._heldout_every = heldout_every

    @override
    def candidates(self, turn: int) -> Iterator[int]:
        return iter(range(turn * _ATTEMPTS, (turn + 1) * _ATTEMPTS))

    @override
    def heldout_candidates(self, wanted: int, heldout_every: int) -> Iterator[int]:
        return iter(range(64 * wanted * heldout_every))

    @override
    def make(self, item: int, problem_id: int) -> Problem:
        asked = self._asked(np.random.default_rng(derived_seed("text to sql", self._seed, self.label, item)))
        row = {"schema": asked.schema.statements, "query": asked.answer(False), "tempting": asked.query}
        shown = "".join(f"{one}\n\n" for one in self._nearest(asked)) if self._cfg.shots else ""
        question = f"{shown}{asked.schema.outline}\n{asked.question}"
        return Problem(problem_id, self.label, question, asked.answer(self._cfg.steps), entry=row)

    @override
    def is_heldout(self, problem: Problem, heldout_every: int) -> bool:
        return question_digest(problem.entry["schema"]) % heldout_every == 0

    @override
    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """Return 1.0 for the text of the reference; `SqlVerifier` compares results."""
        return float(answer.strip().rpartition("\n")[2] == entry["query"])

    def _asked(self, rng: np.random.Generator) -> Asked:
        schema = random_schema(rng, self._cfg.tables)
        table = schema.tables[rng.integers(len(schema.tables))]
        answerable = rng.random() >= self._cfg.unanswerable
        if answerable:
            question, query = _KINDS[int(rng.integers(len(_KINDS)))](table, rng)
            found = [f"{column.thing} is {column.name}" for column in table.columns if is_named(query, column.name)]
        else:
            table = _lacking(table, rng)
            question, query = (_extreme, _compared)[int(rng.integers(2))](table, rng)
            found = [f"{table.columns[0].thing} is nowhere"]
        steps = "; ".join([f"{table.thing} is {table.name}", *found])
        return Asked(schema, question, query, steps, answerable)

    def _nearest(self, asked: Asked) -> Iterator[str]:
        """Yield the examples of a prompt, the nearest question last: of other schemas, and without a value."""
        examples, index = self._examples
        found = (examples[number] for number, _ in index.search(asked.question, 2 * self._cfg.shots))
        others = [one for one in found if one.schema != asked.schema][: self._cfg.shots]
        for one in reversed(others):
            question, answer = masked(Example(one.question, one.answer(self._cfg.steps)))
            yield f"{one.schema.outline}\n{question}\n{answer}"

    @functools.cached_property
    def _examples(self) -> tuple[list[Asked], BM25]:
        """Examples of training schemas, and the index of their questions."""
        found: list[Asked] = []
        for number in itertools.count():
            one = self._asked(
                np.random.default_rng(derived_seed("text to sql example", self._seed, self.label, number))
            )
            if self._heldout_every == 0 or question_digest(one.schema.statements) % self._heldout_every:
                found.append(one)
            if len(found) == _EXAMPLES:
                break
        return found, BM25([masked(Example(one.question, one.query)).question for one in found])


def _lacking(table: Table, rng: np.random.Generator) -> Table:
    """Return the table with no column but a number that it has not: a question about that cannot be answered."""
    thing = _pick(rng, [one for one in NUMBERS if one not in {column.thing for column in table.columns}])
    return dataclasses.replace(table, columns=(Column(thing, _pick(rng, list(NUMBERS[thing])), "INTEGER"),))


def is_named(query: str, name: str) -> bool:
    """Return True if a query has this name as a word."""
    return re.search(rf"\b{name}\b", query) is not None


def _pick[T](rng: np.random.Generator, choices: list[T]) -> T:
    return choices[rng.integers(len(choices))]
