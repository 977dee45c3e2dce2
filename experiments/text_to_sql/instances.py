"""Databases made for a schema: random rows, so that a query can be tried where nobody's data is at hand.

Two queries that agree on one database by chance (both counts are 3) seldom agree on several, so a query is compared on
instances of different seeds.
"""

import re
import sqlite3
from collections.abc import Iterator, Sequence

import numpy as np

from axlearn_like.input.shuffle import derived_seed
from experiments.text_to_sql.database import memory_database

__all__ = ["instance", "literals"]

_ROWS = 14  # rows of each table
_WORDS = ("north", "south", "east", "west")
_LITERAL = re.compile(r"'((?:[^']|'')*)'|(?<![\w.])(\d+(?:\.\d+)?)(?![\w.])")


def literals(query: str) -> tuple[str | float, ...]:
    """Return the texts and numbers of a query, in order and each once."""
    found = [
        float(number) if "." in number else int(number) if number else text.replace("''", "'")
        for text, number in _LITERAL.findall(query)
    ]
    return tuple(dict.fromkeys(found))


def instance(schema: str, seed: int, wanted: Sequence[str | float] = ()) -> sqlite3.Connection:
    """Return a database in memory of this schema, with random rows.

    Args:
        wanted: values that occur, and near which numbers are: those of the query to try.

    Raises:
        sqlite3.Error: the schema is wrong.
    """
    connection = memory_database(schema)
    rng = np.random.default_rng(derived_seed("sql instance", schema, seed))
    for table in _tables(connection):
        _fill(connection, table, rng, wanted)
    connection.commit()
    return connection


def _tables(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield the tables, those that others refer to first."""
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    refers = {name: {row[2] for row in connection.execute(f'PRAGMA foreign_key_list("{name}")')} for name in names}
    done: set[str] = set()
    while left := [name for name in names if name not in done]:
        ready = [name for name in left if not (refers[name] & set(left)) - {name}] or left[:1]  # a circle is cut
        yield from ready
        done |= set(ready)


def _fill(connection: sqlite3.Connection, table: str, rng: np.random.Generator, wanted: Sequence[str | float]) -> None:
    columns = connection.execute(f'PRAGMA table_info("{table}")').fetchall()
    keys = {row[3]: (row[2], row[4]) for row in connection.execute(f'PRAGMA foreign_key_list("{table}")')}
    values: list[list[object]] = []
    for _, name, kind, _, _, primary in columns:
        if name in keys:
            other, column = keys[name]
            target = f'"{column}"' if column else "rowid"
            pool = [value for (value,) in connection.execute(f'SELECT {target} FROM "{other}"')] or [None]
            values.append([pool[rng.integers(len(pool))] for _ in range(_ROWS)])
        elif primary and "INT" in kind.upper():
            values.append(list(range(1, _ROWS + 1)))
        else:
            values.append([_cell(kind.upper(), rng, wanted) for _ in range(_ROWS)])
    places = ", ".join("?" * len(columns))
    connection.executemany(f'INSERT OR IGNORE INTO "{table}" VALUES ({places})', zip(*values, strict=True))


def _cell(kind: str, rng: np.random.Generator, wanted: Sequence[str | float]) -> str | float:
    texts = [one for one in wanted if isinstance(one, str)]
    numbers = [one for one in wanted if not isinstance(one, str)]
    if "DATE" in kind or "TIME" in kind:
        year, month, day, hour = rng.integers([2000, 1, 1, 0], [2026, 13, 29, 24])
        return f"{year}-{month:02}-{day:02}" + (f" {hour:02}:00:00" if "TIME" in kind else "")
    if any(word in kind for word in ("INT", "REAL", "NUM", "DOUBLE", "FLOAT", "DEC")):
        if numbers and rng.random() < 0.5:
            return numbers[rng.integers(len(numbers))] + int(rng.integers(-1, 2))
        value = int(rng.integers(0, 100))
        return value if "INT" in kind else value + round(float(rng.random()), 2)
    pool = [*texts, *texts, *_WORDS]
    return str(pool[rng.integers(len(pool))])
