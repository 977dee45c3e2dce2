"""Queries that nobody trusts, on SQLite: an authorizer lets them read, or write in memory; a clock ends them."""

import sqlite3
import time
from typing import Any, NamedTuple

__all__ = ["QueryTimeout", "Result", "memory_database", "query", "read_only", "savepoint", "writable"]

_READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
_WRITING = (
    *(sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_ALTER_TABLE),
    *(sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_DROP_INDEX),
    *(sqlite3.SQLITE_CREATE_VIEW, sqlite3.SQLITE_DROP_VIEW, sqlite3.SQLITE_REINDEX),
)
# Files, code, and values that differ from call to call.
_REFUSED = ("load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "random", "randomblob")
_STEPS = 1000  # steps of SQLite's machine between two looks at the clock
_LONGEST_VALUE = 1 << 20  # bytes
_SCRIPT_SECONDS = 10.0  # limit of a script that makes a database
_SCRIPT_PAGES = 1 << 16  # limit of 4 KiB pages in a scripted database


class QueryTimeout(RuntimeError):
    """A query took too long."""


class Result(NamedTuple):
    """Names of the columns, the first rows, and whether there are more."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    more: bool


def memory_database(script: str) -> sqlite3.Connection:
    """Return a database in memory that a script makes. The script may be anyone's: it opens and writes no file.

    Raises:
        sqlite3.Error: the script is wrong, names a file (ATTACH, VACUUM INTO), takes over 10 s or makes over 256 MiB.
    """
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.execute(f"PRAGMA max_page_count={_SCRIPT_PAGES}")
    connection.set_authorizer(_authorize_script)
    due = time.monotonic() + _SCRIPT_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > due, _STEPS)
    try:
        connection.executescript(script)
    except BaseException as error:
        connection.close()
        if time.monotonic() > due and isinstance(error, sqlite3.OperationalError):
            raise sqlite3.OperationalError(f"the script is not done after {_SCRIPT_SECONDS:g} s") from error
        raise
    connection.set_progress_handler(None, 0)
    connection.set_authorizer(None)
    return connection


def read_only(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Return the connection, by which nothing can be written, attached or loaded any more."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.set_authorizer(_authorize)
    return connection


def writable(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Return a `memory_database` by which tables can be read and changed, each statement by itself."""
    read_only(connection).isolation_level = None
    connection.set_authorizer(_authorize_writing)
    return connection


def savepoint(connection: sqlite3.Connection, command: str) -> None:
    """Run "SAVEPOINT", "RELEASE" or "ROLLBACK TO" on a `writable` database, whose queries may not.

    Nothing is done where the savepoint is gone: SQLite drops it with all changes if the clock ends a statement.
    """
    if command == "SAVEPOINT" or connection.in_transaction:
        connection.set_authorizer(None)
        try:
            connection.execute(f"{command} partial_query")
        finally:
            connection.set_authorizer(_authorize_writing)


def query(connection: sqlite3.Connection, text: str, *, max_rows: int, seconds: float) -> Result:
    """Run a query of a connection that is `read_only`.

    Raises:
        sqlite3.Error: the query is wrong, or does more than reading.
        QueryTimeout: it is not done after so many seconds.
    """
    due = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > due, _STEPS)
    try:
        cursor = connection.execute(text)
        rows = cursor.fetchmany(max_rows + 1)
    except sqlite3.OperationalError as error:
        if time.monotonic() > due:
            raise QueryTimeout(f"not done after {seconds:g} s") from error
        raise
    finally:
        connection.set_progress_handler(None, 0)
    names = [column[0] for column in cursor.description or ()]
    cursor.close()
    return Result(names, rows[:max_rows], len(rows) > max_rows)


def _authorize_script(action: int, first: str | None, *_: str | None) -> int:
    limit = action == sqlite3.SQLITE_PRAGMA and str(first).lower() in ("max_page_count", "page_size")
    return sqlite3.SQLITE_DENY if limit else sqlite3.SQLITE_OK


def _authorize_writing(action: int, first: str | None, *others: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _WRITING else _authorize(action, first, *others)


def _authorize(action: int, _: str | None, second: str | None, *__: str | None) -> int:
    allowed = action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in _REFUSED
    return sqlite3.SQLITE_OK if allowed or action in _READING else sqlite3.SQLITE_DENY
