"""Queries that run while they are written, and the search for those that can only fail."""

import re
import sqlite3
from collections.abc import Callable
from typing import override

from experiments.text_to_sql.database import savepoint
from rl.environments.tools.tool import ArgumentChecker, Diverged, PartialCall

__all__ = ["PartialQuery", "QueryChecker"]

_BLANKS = " \t\r\n"
_OUTSIDE = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|`[^`]*`|\[[^]]*\]|--[^\n]*|/\*.*?\*/", re.DOTALL)
_GROUP = re.compile(r"\([^()]*\)")
_FAULT = re.compile(r"no such (table|column): (.*)|near \"(.*)\": syntax error", re.DOTALL)
_UNSURE = ("explain", ";", "window")  # the query's own, no query at all, a keyword if a name and AS follow
_SOURCES_OVER = re.compile(r"\bfrom\b(?!.*\bfrom\b).*\b(where|group|having|order|limit)\b", re.DOTALL | re.IGNORECASE)


class PartialQuery(PartialCall):
    """Query that runs as soon as it has its semicolon, or all of its text is there."""

    def __init__(self, run: Callable[[str], str], changed: sqlite3.Connection | None):
        """`run` makes the call; `changed`: the connection if it may write: it does so under a savepoint."""
        self._run, self._changed = run, changed
        self._text, self._known = "", ""  # text so far, and the statement that has run
        self._result: str | Exception = ""
        if changed is not None:
            savepoint(changed, "SAVEPOINT")

    @override
    def feed(self, name: str, text: str) -> None:
        if name not in ("", "query"):
            return
        self._text += text
        if not self._known and sqlite3.complete_statement(self._text):
            self._known = self._text.rstrip(_BLANKS)
            try:
                self._result = self._run(self._known)
            except Exception as error:  # the call itself would raise it
                self._result = error

    @override
    def finish(self, query: str) -> str:
        if not self._known:
            return self._run(query)
        if not query.startswith(self._known) or query[len(self._known) :].strip(_BLANKS):
            raise Diverged("another text follows the statement")
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    @override
    def commit(self) -> None:
        if self._changed is not None:
            savepoint(self._changed, "RELEASE")

    @override
    def discard(self) -> None:
        if self._changed is not None:
            savepoint(self._changed, "ROLLBACK TO")
            savepoint(self._changed, "RELEASE")


class QueryChecker(ArgumentChecker):
    """Search, by EXPLAIN on a database of the same schema, for a query that no further text can correct.

    While it is written, that is one with an unknown table, an unknown column once its FROM is over, or a wrong word;
    the name at the end of the text is left alone: a dot or a parenthesis may follow it. A whole query has any fault.
    """

    def __init__(self, connection: sqlite3.Connection):
        self._connection, self._text = connection, ""

    @override
    def feed(self, text: str) -> str:
        self._text += text
        try:
            self._connection.execute(f"EXPLAIN {self._text}").close()
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
            whole = not text.endswith("\n")
            return f"{type(error).__name__}: {error}" if _hopeless(str(error), self._text, whole) else ""
        return ""


def _hopeless(fault: str, text: str, whole: bool) -> bool:
    found = _FAULT.fullmatch(fault)
    if found is None:
        return whole and fault != "incomplete input"  # nothing but a comment runs, and EXPLAIN of it does not
    kind, name, word = found.groups()
    if (word or "").lower() in _UNSURE:
        return False
    if whole:
        return True
    last = (name or word).rpartition(".")[2]
    if text.rstrip().rstrip("\"`]'").lower().endswith(last.lower()):
        return False
    return kind != "column" or _sources_over(text)


def _sources_over(text: str) -> bool:
    """Return True if no table can be added to the outermost query any more."""
    outer, before = _OUTSIDE.sub(" ", text), ""
    while outer != before:
        outer, before = _GROUP.sub(" ", outer), outer
    return ";" in outer or _SOURCES_OVER.search(outer) is not None
