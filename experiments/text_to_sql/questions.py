"""Questions about small random schemas, without limit: a source of problems for text-to-SQL.

Some cannot be answered, since no table has what they ask for; the right answer is then to abstain. Training and
held-out problems are apart by their schemas, of which examples in a prompt are training ones.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, override

import numpy as np

from axlearn_like.input.shuffle import derived_seed
from experiments.text_to_sql.schemas import NUMBERS, Schema, Table, random_schema
from rl.protocol.messages import Problem
from rl.tasks.heldout import question_digest
from rl.tasks.source import ProblemSource

__all__ = ["ABSTAIN", "LAST_LINE", "SqlQuestions"]

ABSTAIN = "null"
LAST_LINE = r"(?m)^(.+)$"
_VALUES = ("north", "south", "east", "west")
_ATTEMPTS = 16


class Asked(NamedTuple):
    """A question about a schema, the query, and what a query needs to find out first."""

    schema: Schema
    question: str
    query: str
    steps: str

    def answer(self, steps: bool) -> str:
        """Return the query, behind the steps."""
        return f"{self.steps}\n{self.query}" if steps else self.query


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
_WITHOUT_VALUES: tuple[Kind, ...] = (_all, _extreme, _grouped)


class SqlQuestions(ProblemSource):
    """Problems with the fields `schema` (CREATE TABLE statements) and `query` of their rows; the answer is the query.

    The prompt has names of tables and columns, and no value of any database; nor have the examples in it.
    """

    class Config(ProblemSource.Config):
        tables: int = 2
        unanswerable: float = 0.2  # share of questions about a column that no table has
        shots: int = 0  # examples before the question, each with a schema of its own
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
        asked = self._asked(np.random.default_rng(derived_seed("text to sql", self._seed, self.label, item)), _KINDS)
        row = {"schema": asked.schema.statements, "query": asked.query}
        shown = "".join(f"{one}\n\n" for one in self._examples(item, asked.schema.statements))
        question = f"{shown}{asked.schema.outline}\n{asked.question}"
        return Problem(problem_id, self.label, question, asked.answer(self._cfg.steps), entry=row)

    @override
    def is_heldout(self, problem: Problem, heldout_every: int) -> bool:
        return question_digest(problem.entry["schema"]) % heldout_every == 0

    @override
    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """Return 1.0 for the text of the reference; `SqlVerifier` compares results."""
        return float(answer.strip().rpartition("\n")[2] == entry["query"])

    def _asked(self, rng: np.random.Generator, kinds: Sequence[Kind]) -> Asked:
        schema = random_schema(rng, self._cfg.tables)
        table = schema.tables[rng.integers(len(schema.tables))]
        question, query = kinds[int(rng.integers(len(kinds)))](table, rng)
        lacking = ""
        if rng.random() < self._cfg.unanswerable:
            question, query, lacking = self._unanswerable(table, rng, values=kinds is _KINDS)
        named = [f"{column.thing} is {column.name}" for column in table.columns if _names(query, column.name)]
        steps = [f"{table.thing} is {table.name}", *named, *[f"{lacking} is nowhere"] * bool(lacking)]
        return Asked(schema, question, query, "; ".join(steps))

    def _examples(self, item: int, schema: str) -> Iterator[str]:
        """Yield the examples of a prompt: training schemas that are not its own, and questions without a value."""
        left, attempt = self._cfg.shots, 0
        while left:
            seed = derived_seed("text to sql example", self._seed, self.label, item, attempt)
            one, attempt = self._asked(np.random.default_rng(seed), _WITHOUT_VALUES), attempt + 1
            digest = question_digest(one.schema.statements)
            if one.schema.statements != schema and (self._heldout_every == 0 or digest % self._heldout_every):
                yield f"{one.schema.outline}\n{one.question}\n{one.answer(self._cfg.steps)}"
                left -= 1

    def _unanswerable(self, table: Table, rng: np.random.Generator, *, values: bool) -> tuple[str, str, str]:
        """Ask for a number that this table has not, as one of the answerable questions would; and name it."""
        lacking = [thing for thing in NUMBERS if thing not in {column.thing for column in table.columns}]
        thing = lacking[rng.integers(len(lacking))]
        if rng.random() < 0.5 and values:
            word, number = ("over", "under")[rng.integers(2)], rng.integers(10, 90)
            return f"How many {table.thing} with {thing} {word} {number}?", ABSTAIN, thing
        word = ("highest", "lowest", "mean")[rng.integers(3)]
        return f"The {word} {thing} of {table.thing}?", ABSTAIN, thing


def _names(query: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", query) is not None


def _pick[T](rng: np.random.Generator, choices: list[T]) -> T:
    return choices[rng.integers(len(choices))]
