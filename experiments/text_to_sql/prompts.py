"""Prompts of text-to-SQL: names of a schema, examples, and a request for steps; never a value of a database.

A schema is shown by what SQLite says of its tables after it has read the statements, so that rows, defaults, checks and
comments in them do not reach a prompt. Values in examples are masked.
"""

import contextlib
import functools
import re
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from axlearn_like.input.source import InputError
from experiments.text_to_sql.database import memory_database
from experiments.text_to_sql.instances import literals

__all__ = ["Example", "instructed", "masked", "outline"]

_ASKED = "Write one SQLite query that answers the question, or null if these tables cannot answer it."
_STEPS = "First name the tables, columns and conditions that it needs; then give the query in a ```sql block."
_TRIES = (
    "You are shown its error, or how many rows it gives and of which types, and may write another; ok keeps the last."
)
_MASK = "..."


class Example(NamedTuple):
    """A question with its query, or `null`."""

    question: str
    query: str


def outline(statements: str) -> str:
    """Return a schema as names: a table a line, with its columns, their types, and the columns that they refer to.

    Raises:
        InputError: the statements do not run.
    """
    try:
        with contextlib.closing(memory_database(statements)) as connection:
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%'")
            return "\n".join(_table(connection, name) for (name,) in rows.fetchall())
    except sqlite3.Error as error:
        raise InputError(f"the schema does not run: {error}") from None


@functools.lru_cache(maxsize=4096)  # an example is in many prompts
def masked(example: Example) -> Example:
    """Return an example without the values that its query names: `...` in their place, in the question too.

    Of a question without an answer all numbers are masked.
    """
    question, query = example
    for value in sorted(map(str, literals(query)), key=len, reverse=True):
        pattern = rf"(?<!\w)(?<!\d\.){re.escape(value)}(?!\w|\.\d)" if value.strip() else re.escape(value)
        question = re.sub(pattern, _MASK, question, flags=re.IGNORECASE) if value else question
    if not literals(query):  # `null`, whose values nothing tells: no number stays
        question = re.sub(r"\d+(?:[.,:/-]\d+)*", _MASK, question)
    query = re.sub(r"'(?:[^']|'')*'", f"'{_MASK}'", query)
    return Example(question, re.sub(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", _MASK, query))


def instructed(
    schema: str, question: str, examples: Sequence[Example] = (), *, steps: bool = False, tries: bool = False
) -> str:
    """Return a prompt for a model that follows instructions.

    Args:
        schema: its `outline`.
        examples: questions on the same schema, which are masked.
        steps: ask for a chain of thought before the query.
        tries: say that there are several (`SqlAttempts`).
    """
    shown = [f"Question: {one.question}\nAnswer: {one.query}" for one in map(masked, examples)]
    asked = " ".join([_ASKED, *[_STEPS] * steps, *[_TRIES] * tries])
    return "\n\n".join([asked, schema, *shown, f"Question: {question}\nAnswer:"])


def _table(connection: sqlite3.Connection, name: str) -> str:
    keys = {
        row[3]: f" -> {row[2]}.{row[4] or 'rowid'}" for row in connection.execute(f'PRAGMA foreign_key_list("{name}")')
    }
    columns = connection.execute(f'PRAGMA table_info("{name}")').fetchall()
    shown = [f"{column} {_kind(kind)}".strip() + keys.get(column, "") for _, column, kind, *_ in columns]
    return f"{name}({', '.join(shown)})"


def _kind(declared: str) -> str:
    """Return a type without what stands in brackets behind it."""
    return declared.partition("(")[0].strip().upper()
