"""Questions about small random schemas, without limit: a source of problems for text-to-SQL.

Some cannot be answered, since no table has what they ask for; the right answer is then to abstain. Training and
held-out problems are apart by their schemas.
"""

from collections.abc import Callable, Iterator
from typing import Any, override

import numpy as np

from axlearn_like.input.shuffle import derived_seed
from rl.roles.messages import Problem
from rl.tasks.heldout import question_digest
from rl.tasks.source import ProblemSource
from rl.tasks.sql.schemas import NUMBERS, Schema, Table, random_schema

__all__ = ["ABSTAIN", "SqlQuestions"]

ABSTAIN = "null"
_VALUES = ("north", "south", "east", "west")
_ATTEMPTS = 16


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


_KINDS: tuple[Callable[[Table, np.random.Generator], tuple[str, str]], ...] = (
    _all,
    _extreme,
    _compared,
    _equal,
    _grouped,
)


class SqlQuestions(ProblemSource):
    """Problems with the fields `schema` (CREATE TABLE statements) and `query` of their rows; the answer is the query.

    The prompt has names of tables and columns, and no value of any database.
    """

    class Config(ProblemSource.Config):
        tables: int = 2
        unanswerable: float = 0.2
        """Share of questions about a column that no table has."""

        @property
        @override
        def title(self) -> str:
            return self.label or "text_to_sql"

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("tables", 1 <= self.tables <= 4, "1 to 4")
            self.require("unanswerable", 0 <= self.unanswerable < 1, "0 up to 1")

    def __init__(self, cfg: Config, *, seed: int):
        super().__init__(cfg)
        self._cfg, self._seed = cfg, seed

    @override
    def candidates(self, turn: int) -> Iterator[int]:
        return iter(range(turn * _ATTEMPTS, (turn + 1) * _ATTEMPTS))

    @override
    def heldout_candidates(self, wanted: int, heldout_every: int) -> Iterator[int]:
        return iter(range(64 * wanted * heldout_every))

    @override
    def make(self, item: int, problem_id: int) -> Problem:
        rng = np.random.default_rng(derived_seed("text to sql", self._seed, self.label, item))
        schema = random_schema(rng, self._cfg.tables)
        table = schema.tables[rng.integers(len(schema.tables))]
        question, query = _KINDS[rng.integers(len(_KINDS))](table, rng)
        if rng.random() < self._cfg.unanswerable:
            question, query = self._unanswerable(schema, table, rng)
        row = {"schema": schema.statements, "query": query}
        return Problem(problem_id, self.label, f"{schema.outline}\n{question}", query, entry=row)

    @override
    def is_heldout(self, problem: Problem, heldout_every: int) -> bool:
        return question_digest(problem.entry["schema"]) % heldout_every == 0

    @override
    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """Return 1.0 for the text of the reference; `SqlVerifier` compares results."""
        return float(answer.strip() == entry["query"])

    def _unanswerable(self, schema: Schema, table: Table, rng: np.random.Generator) -> tuple[str, str]:
        """Ask for a number that this table has not, as one of the answerable questions would."""
        lacking = [thing for thing in NUMBERS if thing not in {column.thing for column in table.columns}]
        thing = lacking[rng.integers(len(lacking))]
        if rng.random() < 0.5:
            word, number = ("over", "under")[rng.integers(2)], rng.integers(10, 90)
            return f"How many {table.thing} with {thing} {word} {number}?", ABSTAIN
        word = ("highest", "lowest", "mean")[rng.integers(3)]
        return f"The {word} {thing} of {table.thing}?", ABSTAIN


def _pick[T](rng: np.random.Generator, choices: list[T]) -> T:
    return choices[rng.integers(len(choices))]
