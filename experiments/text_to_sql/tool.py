"""SQL on an SQLite database as a tool: an authorizer knows nothing but reading, or writing in memory."""

import functools
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, override

from experiments.text_to_sql.database import memory_database, query, read_only, writable
from experiments.text_to_sql.partial import PartialQuery, QueryChecker
from rl.environments.tools.tool import ArgumentChecker, Tool

__all__ = ["SQLTool"]


class SQLTool(Tool):
    """`sql(query)`: the names of the columns and the first rows, one a line. Each episode has its own connection.

    With `PartialExecution` the database is opened once the call begins, and a query runs at its semicolon.
    """

    class Config(Tool.Config):
        name: str = "sql"
        description: str = "Run a query (SELECT) on the SQLite database. Returns column names and rows."
        pure: bool = True
        # Path of a file; $NAME is from the environment. None: the field of the row, or `script` alone.
        database: str | None = None
        field: str | None = None  # field of the row with the path of its database
        script: str = ""  # SQL that makes a database in memory, if there is no file
        writable: bool = False  # queries may change the tables of `script`, of which each episode has its own
        max_rows: int = 20
        seconds: float = 2.0  # seconds that a query may take

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require_least(1, "max_rows")
            self.require("seconds", self.seconds > 0, "seconds, more than 0")
            places = [self.database is not None, self.field is not None, bool(self.script)]
            self.require("database", sum(places) == 1, "one of database, field and script")
            self.require("writable", bool(self.script) or not self.writable, "False without a script")
            if self.database is not None:
                path = _expanded(self.database)
                self.require("database", path.is_file(), f"a file (it is {path})")

        @override
        def checker(self, name: str, row: Mapping[str, Any]) -> ArgumentChecker | None:
            if self.writable or name not in ("", "query"):  # tables may be others by then
                return None
            return QueryChecker(_shared(self.place(row), self.script))

        def place(self, row: Mapping[str, Any]) -> str | None:
            """Return the path of an episode's database; None: the script makes it."""
            return self.database if self.field is None else row[self.field]

    def __init__(self, cfg: Config, *, connection: sqlite3.Connection | None = None):
        """`connection`: of an episode; None: of the tool itself, which `open` makes more of."""
        self._cfg, self._connection = cfg, connection

    @override
    def open(self, row: Mapping[str, Any]) -> "SQLTool":
        return SQLTool(self._cfg, connection=connect(self._cfg.place(row), self._cfg.script, self._cfg.writable))

    @override
    def begin(self) -> PartialQuery:
        if self._connection is None:
            raise RuntimeError("the database is not open")
        return PartialQuery(self.call, self._connection if self._cfg.writable else None)

    @override
    def call(self, query: str) -> str:
        if self._connection is None:
            raise RuntimeError("the database is not open")
        return _table(self._connection, query, self._cfg.max_rows, self._cfg.seconds)

    @override
    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def connect(place: str | None, script: str = "", write: bool = False) -> sqlite3.Connection:
    """Open a database: a file for reading alone, or one in memory that a script makes.

    Raises:
        OSError: there is no such file. sqlite3.Error: the script is wrong.
    """
    if place is None:
        connection = memory_database(script)
        if write:
            return writable(connection)
    else:
        path = _expanded(place)
        if not path.is_file():
            raise FileNotFoundError(f"no database {path}")
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
    return read_only(connection)


@functools.lru_cache(maxsize=64)
def _shared(place: str | None, script: str) -> sqlite3.Connection:
    """Return the connection that the checkers of a database share; it only explains."""
    return connect(place, script)


def _table(connection: sqlite3.Connection, text: str, max_rows: int, seconds: float) -> str:
    found = query(connection, text, max_rows=max_rows, seconds=seconds)
    lines = [" | ".join(found.columns), *(" | ".join(map(_cell, row)) for row in found.rows)]
    return "\n".join([*lines, "..."] if found.more else lines)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    return f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)


def _expanded(place: str) -> Path:
    return Path(os.path.expandvars(place)).expanduser()
