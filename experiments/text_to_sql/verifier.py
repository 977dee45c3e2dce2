"""Verifier of SQL: the query's result on several made databases is that of the reference; or it abstains rightly.

Results are compared as EHRSQL-2024 does: floats to three digits, cells as text, rows in any order, the first hundred.
RS(c), its score, gives 1 for a right answer and for a right abstention, 0 for an abstention where there was an answer,
and -c for a wrong answer.
"""

import functools
import re
import sqlite3
from typing import Any, override

from experiments.text_to_sql.database import QueryTimeout, Result, query, read_only
from experiments.text_to_sql.instances import instance, literals
from rl.protocol.messages import Problem
from rl.verification.verifiers.rows import RowScorer

__all__ = ["SqlVerifier", "compared", "statement"]

_FENCED = re.compile(r"```(?:sql)?\s*\n(.*?)\n?\s*```", re.DOTALL | re.IGNORECASE)
_KEPT = 64  # problems whose databases are kept open


class SqlVerifier(RowScorer):
    """Scores a query by execution; the row holds the schema, as CREATE TABLE statements, and the reference query.

    Terms: "right" (also by abstaining), "wrong" (an answer, and not the right one), "abstained", "ran". So RS(c) of
    many answers is the mean of right - c * wrong.
    """

    VERSION = 1

    class Config(RowScorer.Config):
        schema_field: str = "schema"
        abstain: str = "null"  # answer, and reference, where nothing can be answered
        penalty: float = 0.0  # c: what a wrong answer costs
        instances: int = 3  # databases, of different rows
        max_rows: int = 100  # rows that are compared
        seconds: float = 1.0  # seconds that a query may take on each

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require_least(1, "instances", "max_rows")
            self.require_least(0, "penalty")
            self.require("seconds", self.seconds > 0, "seconds, more than 0")

        @override
        def negative(self) -> str | None:
            return "penalty" if self.penalty else None

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg
        self._expected = functools.lru_cache(maxsize=_KEPT)(self._made)

    @override
    def judge(self, answer: str, reference: Any, problem: Problem) -> dict[str, float]:
        cfg, text, wanted = self._cfg, statement(answer), str(reference).strip()
        abstained, unanswerable = text.lower() == cfg.abstain, wanted.lower() == cfg.abstain
        ran = right = False
        if abstained:
            right = unanswerable
        else:
            # Where there is no answer a query is wrong, whatever it gives.
            ran, right = self._compared(text, "" if unanswerable else wanted, str(problem.entry[cfg.schema_field]))
        wrong = not right and not abstained
        terms = {"right": float(right), "wrong": float(wrong), "abstained": float(abstained), "ran": float(ran)}
        return {"reward": terms["right"] - cfg.penalty * terms["wrong"], **terms}

    def _compared(self, text: str, reference: str, schema: str) -> tuple[bool, bool]:
        """Return whether a query runs, and whether its results are those of the reference ("": none are)."""
        for connection, expected in self._expected(schema, reference):
            try:
                if self._result(connection, text) != expected:
                    return True, False
            except (sqlite3.Error, sqlite3.Warning, QueryTimeout, ValueError):  # ValueError: a null character
                return False, False
        return True, bool(reference)

    def _made(self, schema: str, reference: str) -> list[tuple[sqlite3.Connection, Any]]:
        """Return databases, each with the reference's result.

        Raises:
            LookupError: the schema or the reference does not run.
        """
        made: list[tuple[sqlite3.Connection, Any]] = []
        for seed in range(self._cfg.instances):
            try:
                connection = read_only(instance(schema, seed, literals(reference)))
                made.append((connection, self._result(connection, reference) if reference else None))
            except (sqlite3.Error, QueryTimeout) as error:
                raise LookupError(f"the reference {reference!r} does not run on its schema: {error}") from error
        return made

    def _result(self, connection: sqlite3.Connection, text: str) -> Any:
        found = query(connection, text, max_rows=self._cfg.max_rows, seconds=self._cfg.seconds)
        if not found.columns:
            raise sqlite3.ProgrammingError("not a query")
        return compared(found)


def compared(found: Result) -> tuple[tuple[tuple[str, ...], ...], bool]:
    """Return of a result what two queries must have in common."""
    return tuple(sorted(tuple(map(_cell, row)) for row in found.rows)), found.more


def _cell(value: Any) -> str:
    return str(round(value, 3)) if isinstance(value, float) else str(value)


def statement(answer: str) -> str:
    """Return the last fenced block, or all, without the semicolon at its end."""
    fenced = _FENCED.findall(answer)
    return (fenced[-1] if fenced else answer).strip().rstrip(";").strip()
