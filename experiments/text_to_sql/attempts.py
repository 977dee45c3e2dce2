"""A query, its error or the shape of its result, and another try; a vote of queries by what they give.

    {prompt}                  SELECT MAX(kg) FROM cases
    no such column: kg        SELECT MAX(weight) FROM cases
    1 row: INTEGER            ok

No cell can reach the policy: errors come from a database of the same names without a row, and of a result it is told
how many rows there are and of which types (of SQLite's five) the cells of each column are.
"""

import collections
import contextlib
import functools
import sqlite3
from collections.abc import Mapping
from typing import Any, override

from experiments.text_to_sql.database import QueryTimeout, memory_database, query, read_only
from experiments.text_to_sql.instances import instance
from experiments.text_to_sql.tool import connect
from experiments.text_to_sql.verifier import compared, statement
from rl.environments.environment import Consult, Environment, Row, Step
from rl.verification.verifiers.rows import last_match

__all__ = ["KEPT", "SqlAttempts"]

KEPT = "ok"  # action by which the last query is the answer
# ValueError: a null character, or an error that quotes bytes which are no text.
_FAILURES = (sqlite3.Error, sqlite3.Warning, QueryTimeout, ValueError)
_SEED = 1 << 20  # database of the policy's tries: none of the verifier's
_TYPES = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB", type(None): "NULL"}


class SqlAttempts(Environment):
    """Tries of a query: each is answered by its error, or by the shape of its result.

    The answer is the last query, `null`, or the query that `ok` keeps. With `votes`, as many queries more are drawn
    side by side, and the answer is one of the results that most have, or `null` if too few agree.
    """

    class Config(Environment.Config):
        max_turns: int = 16
        verify: bool = True
        pure: bool = True
        tries: int = 2  # actions; the last one is the answer without being tried
        votes: int = 0  # queries that are drawn beside the answer; 0: there is no vote
        agree: float = 0.0  # share of the votes that a result needs; below it the answer is `abstain`
        database: str | None = None  # path of a file, $NAME is from the environment; None: one made of the schema
        schema_field: str = "schema"
        abstain: str = "null"
        answer_pattern: str | None = None  # regular expression of which the last match is the query; None: all
        seconds: float = 1.0  # seconds that a query may take
        max_rows: int = 100  # rows that are counted, and compared in a vote
        max_error: int = 200  # characters of an error that the policy is shown

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require_least(1, "tries", "max_rows", "max_error")
            self.require_least(0, "votes")
            self.require("votes", self.votes <= 64, "0 to 64")
            self.require("max_turns", self.max_turns >= self.tries, f"tries={self.tries} or more")
            self.require("agree", 0 <= self.agree <= 1, "0 to 1")
            self.require("agree", not self.agree or self.votes > 0, "0 without `votes`")

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._cfg, self._prompt, self._answer, self._tried = cfg, "", "", 0
        self._schema, self._open = "", contextlib.ExitStack()
        self._figures: dict[str, float] = {}

    @override
    def reset(self, row: Row) -> str:
        self._prompt, self._schema = row["question"], row[self._cfg.schema_field]
        return ""

    @override
    def step(self, action: str) -> Any:
        text, self._tried = self._query(action), self._tried + 1
        if text.lower() not in ("", KEPT) or not self._answer:
            self._answer = text
            if text.lower() != self._cfg.abstain and self._tried < self._cfg.tries:
                return f"\n{self._shape(text)}\n", 0.0, False
        if not self._cfg.votes:
            return Step(done=True, answer=self._answer)
        return Consult(None, self._prompt, samples=self._cfg.votes)

    @override
    def hear(self, answer: list[str]) -> Any:
        votes = [self._answer, *map(self._query, answer)]
        results = [self._result(text) for text in votes]
        counts = collections.Counter(one for one in results if one is not None)
        best, count = max(counts.items(), key=lambda one: one[1], default=(None, 0))  # the first among equals
        self._figures["agreed"] = count / len(votes)
        agreed = best is not None and count >= self._cfg.agree * len(votes)
        return Step(done=True, answer=votes[results.index(best)] if agreed else self._cfg.abstain)

    @override
    def figures(self) -> Mapping[str, float]:
        return {"tries": float(self._tried), **self._figures}

    @override
    def close(self) -> None:
        self._open.close()

    def _query(self, action: str) -> str:
        pattern = self._cfg.answer_pattern
        found = action if pattern is None else last_match(pattern, action)
        return statement(found or "")

    def _shape(self, text: str) -> str:
        """Return why a query does not run, or how many rows it gives and the types in each column."""
        cfg, (bare, filled) = self._cfg, self._databases
        try:
            if not query(bare, text, max_rows=cfg.max_rows, seconds=cfg.seconds).columns:
                return "not a query"
        except QueryTimeout:
            return "too slow"
        except _FAILURES as error:
            return " ".join(str(error).split())[: cfg.max_error]
        try:
            found = query(filled, text, max_rows=cfg.max_rows, seconds=cfg.seconds)
        except _FAILURES:
            return "fails on the rows"  # the error may name a cell
        kinds = ["/".join(sorted({_TYPES[type(cell)] for cell in column})) for column in zip(*found.rows, strict=True)]
        count = f"{len(found.rows)}{'+' if found.more else ''} row{'s' * (len(found.rows) != 1)}"
        return f"{count}: {', '.join(kinds)}" if kinds else count

    def _result(self, text: str) -> Any:
        """Return what a vote compares; None: the query does not run."""
        if text.lower() == self._cfg.abstain:
            return self._cfg.abstain
        try:
            found = query(self._databases[1], text, max_rows=self._cfg.max_rows, seconds=self._cfg.seconds)
        except _FAILURES:
            return None
        return compared(found) if found.columns else None

    @functools.cached_property
    def _databases(self) -> tuple[sqlite3.Connection, sqlite3.Connection]:
        """The names of the database without a row, and the database."""
        place = self._cfg.database
        filled = read_only(instance(self._schema, _SEED)) if place is None else connect(place)
        self._open.callback(filled.close)
        bare = memory_database(_without_rows(filled))
        self._open.callback(bare.close)
        return read_only(bare), filled


def _without_rows(connection: sqlite3.Connection) -> str:
    """Return statements that make the tables of a database by their names alone."""
    made: list[str] = []
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall():
        if name.lower().startswith("sqlite_"):
            continue
        columns = connection.execute(f"SELECT * FROM {_quoted(name)} LIMIT 0").description
        made.append(f"CREATE TABLE {_quoted(name)} ({', '.join(_quoted(column[0]) for column in columns)});")
    return "\n".join(made)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
