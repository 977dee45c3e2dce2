"""SQL on an SQLite database as a tool: read-only, by an authorizer that knows nothing but reading."""

import os
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, override

from rl.environments.tools.tool import Tool

__all__ = ["SQLTool", "query"]

_READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
# Files, code, and values that differ from call to call.
_REFUSED = ("load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "random", "randomblob")
_STEPS = 1000  # of SQLite's machine between two looks at the clock
_LONGEST_VALUE = 1 << 20  # bytes

Rows = tuple[list[str], list[Any], bool]  # column names, rows, and whether there are more


class SQLTool(Tool):
    """`sql(query)`: the names of the columns and the first rows, one a line. Each episode has its own connection."""

    class Config(Tool.Config):
        name: str = "sql"
        description: str = "Run a query (SELECT) on the SQLite database. Returns column names and rows."
        pure: bool = True
        database: str | None = None
        """Path of a file; $NAME is from the environment. None: the field of the row, or `script` alone."""
        field: str | None = None
        """Field of the row with the path of its database."""
        script: str = ""
        """SQL that makes a database in memory, if there is no file."""
        max_rows: int = 20
        seconds: float = 2.0
        """Seconds that a query may take."""

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require_least(1, "max_rows")
            self.require("seconds", self.seconds > 0, "seconds, more than 0")
            places = [self.database is not None, self.field is not None, bool(self.script)]
            self.require("database", sum(places) == 1, "one of database, field and script")
            if self.database is not None:
                path = _expanded(self.database)
                self.require("database", path.is_file(), f"a file (it is {path})")

        @override
        def schema(self) -> dict[str, Any]:
            return {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}

    def __init__(self, cfg: Config, *, connection: sqlite3.Connection | None = None):
        """`connection`: of an episode; None: of the tool itself, which `open` makes more of."""
        self._cfg, self._connection = cfg, connection

    @override
    def open(self, row: Mapping[str, Any]) -> "SQLTool":
        cfg = self._cfg
        place = cfg.database if cfg.field is None else row[cfg.field]
        return SQLTool(cfg, connection=connect(place, cfg.script))

    @override
    def call(self, query: str) -> str:
        if self._connection is None:
            raise RuntimeError("the database is not open")
        return _table(self._connection, query, self._cfg.max_rows, self._cfg.seconds)

    @override
    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def connect(place: str | None, script: str = "") -> sqlite3.Connection:
    """Open a database for reading alone: a file, or one in memory that a script makes.

    Raises:
        OSError: there is no such file. sqlite3.Error: the script is wrong.
    """
    if place is None:
        connection = sqlite3.connect(":memory:", check_same_thread=False)
        connection.executescript(script)
    else:
        path = _expanded(place)
        if not path.is_file():
            raise FileNotFoundError(f"no database {path}")
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.set_authorizer(_authorize)
    return connection


def query(connection: sqlite3.Connection, text: str, max_rows: int, seconds: float) -> Rows:
    """Return column names, the first rows, and whether there are more.

    Raises:
        sqlite3.Error: the query is wrong or does more than reading. RuntimeError: it takes too long.
    """
    due = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > due, _STEPS)
    try:
        cursor = connection.execute(text)
        rows = cursor.fetchmany(max_rows + 1)
    except sqlite3.OperationalError as error:
        if time.monotonic() > due:
            raise RuntimeError(f"not done after {seconds:g} s") from error
        raise
    finally:
        connection.set_progress_handler(None, 0)
    names = [column[0] for column in cursor.description or ()]
    cursor.close()
    return names, rows[:max_rows], len(rows) > max_rows


def _table(connection: sqlite3.Connection, text: str, max_rows: int, seconds: float) -> str:
    names, rows, more = query(connection, text, max_rows, seconds)
    lines = [" | ".join(names), *(" | ".join(map(_cell, row)) for row in rows)]
    return "\n".join([*lines, "..."] if more else lines)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    return f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)


def _authorize(action: int, first: str | None, second: str | None, database: str | None, inner: str | None) -> int:
    del first, database, inner
    if action in _READING:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in _REFUSED:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _expanded(place: str) -> Path:
    return Path(os.path.expandvars(place)).expanduser()
