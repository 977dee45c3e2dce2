"""Queries that nobody trusts, on SQLite: they may read, or write in memory; their time and memory have limits."""

import itertools
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
_STEPS = 100  # steps of SQLite's machine between two looks at the clock
_LIMITS = {
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    # Bytes of a value. The clock cannot end a function, and some take the product of the lengths of two values.
    sqlite3.SQLITE_LIMIT_LENGTH: 1 << 16,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1 << 8,
}
_LARGEST_RESULT = 1 << 24  # bytes of texts and blobs in the rows of a query
# Bytes that SQLite takes in a process, databases in memory included: a short query may ask for a plan without end.
_LARGEST_HEAP = 1 << 30
_PRAGMAS = ("max_page_count", "page_size", "hard_heap_limit", "soft_heap_limit")  # limits that a script may not set
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
        sqlite3.Error: the script is wrong, names a file (ATTACH, VACUUM INTO), takes over 10 s or makes over 256 MiB,
            or a value over 64 KiB.
    """
    connection = _limited(sqlite3.connect(":memory:", check_same_thread=False))
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
        if isinstance(error, MemoryError):
            raise _out_of_memory() from error
        raise
    connection.set_progress_handler(None, 0)
    connection.set_authorizer(None)
    return connection


def read_only(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Return the connection, by which nothing can be written, attached or loaded any more."""
    _limited(connection).set_authorizer(_authorize)
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
        sqlite3.Error: the query is wrong, does more than reading, or takes too much memory.
        QueryTimeout: it is not done after so many seconds.
    """
    due = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > due, _STEPS)
    try:
        cursor = connection.execute(text)
        rows = _rows(cursor, max_rows + 1)
    except MemoryError as error:
        raise _out_of_memory() from error
    except sqlite3.OperationalError as error:
        if time.monotonic() > due:
            raise QueryTimeout(f"not done after {seconds:g} s") from error
        raise
    finally:
        connection.set_progress_handler(None, 0)
    names = [column[0] for column in cursor.description or ()]
    cursor.close()
    return Result(names, rows[:max_rows], len(rows) > max_rows)


def _limited(connection: sqlite3.Connection) -> sqlite3.Connection:
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    connection.execute(f"PRAGMA hard_heap_limit={_LARGEST_HEAP}")
    return connection


def _rows(cursor: sqlite3.Cursor, most: int) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    room = _LARGEST_RESULT
    for row in itertools.islice(cursor, most):
        rows.append(row)
        room -= sum(len(cell) for cell in row if isinstance(cell, str | bytes))
        if room < 0:
            raise sqlite3.DataError(f"the result is larger than {_LARGEST_RESULT >> 20} MiB")
    return rows


def _out_of_memory() -> sqlite3.OperationalError:
    return sqlite3.OperationalError(f"out of memory: SQLite may take {_LARGEST_HEAP >> 20} MiB in a process")


def _authorize_script(action: int, first: str | None, *_: str | None) -> int:
    limit = action == sqlite3.SQLITE_PRAGMA and str(first).lower() in _PRAGMAS
    return sqlite3.SQLITE_DENY if limit else sqlite3.SQLITE_OK


def _authorize_writing(action: int, first: str | None, *others: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _WRITING else _authorize(action, first, *others)


def _authorize(action: int, _: str | None, second: str | None, *__: str | None) -> int:
    allowed = action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in _REFUSED
    return sqlite3.SQLITE_OK if allowed or action in _READING else sqlite3.SQLITE_DENY
