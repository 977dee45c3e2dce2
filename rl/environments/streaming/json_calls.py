"""Events of calls as JSON objects between marks, with a name and arguments: by key and value as they are complete."""

import json
import re
from collections.abc import Iterator
from typing import Any

from rl.environments.streaming.events import ArgumentPart, Event, Finished, Invalid, Started

_BLANK = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_LINE = re.compile(r'(?:[^"\\]|\\[^n])*?\\n', re.DOTALL)
_VALUES = frozenset('"{[-0123456789tfnNI')  # first characters of values that Python reads
_DELIMITERS = frozenset(", \t\n\r}]")
_DECODER = json.JSONDecoder()


class _NotYet(Exception):
    """The text ends within what is read."""


def json_events(text: str, opening: str, closing: str) -> Iterator[Event]:
    """Yield the events of a text."""
    pieces, at = text.split(opening), 0
    for number, piece in enumerate(pieces[1:]):
        at += len(pieces[number]) + len(opening)
        body, closed, _ = piece.partition(closing)
        last = number == len(pieces) - 2
        known = body if closed or not last else _before_mark(body, (opening, closing))
        yield from _Reader(known, number, at).events()
        if closed:
            end = at + len(body) + len(closing)
            yield Finished(number, opening + body + closing, end)


def _before_mark(text: str, marks: tuple[str, ...]) -> str:
    """Return a text without an end that may be the beginning of a mark."""
    most = max(map(len, marks)) - 1
    for length in range(min(most, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length]
    return text


class _Reader:
    """Reader of the body of one call, which begins at a place of the action."""

    def __init__(self, body: str, number: int, first: int):
        self._body, self._number, self._first = body, number, first
        self._at = 0
        self._tool = ""
        self._early: list[Event] = []  # parts of arguments before the name

    def events(self) -> Iterator[Event]:
        try:
            yield from self._object(self._field)
            if self._next():
                yield self._invalid("text behind the JSON object")
        except _NotYet:
            return
        except ValueError as error:
            yield self._invalid(f"not JSON: {error}")

    def _object(self, read: Any) -> Iterator[Event]:
        """Read an object, with `read(key)` for each value."""
        self._expect("{")
        if self._peek() == "}":
            self._expect("}")
            return
        while True:
            key = self._string()
            self._expect(":")
            yield from read(key)
            if self._peek() != ",":
                break
            self._expect(",")
        self._expect("}")

    def _field(self, key: str) -> Iterator[Event]:
        if key == "name" and not self._tool:
            if self._peek() != '"':
                raise ValueError("the name is no text")
            self._tool = self._string()
            yield Started(self._number, self._tool, self._first + self._at)
            yield from self._early
        elif key == "arguments" and self._peek() == "{":
            for part in self._object(self._argument):
                if self._tool:
                    yield part
                else:
                    self._early.append(part)
        else:
            self._value()

    def _argument(self, key: str) -> Iterator[Event]:
        if self._peek() != '"':
            yield self._part(key, self._value())
            return
        start = self._at + 1
        while (line := _LINE.match(self._body, start)) is not None:
            yield ArgumentPart(self._number, key, _decoded(line[0]), self._first + line.end())
            start = line.end()
        end = _STRING.match(self._body, self._at)
        if end is None:
            raise _NotYet
        self._at = end.end()
        yield self._part(key, _decoded(self._body[start : end.end() - 1]))

    def _part(self, key: str, text: str) -> ArgumentPart:
        return ArgumentPart(self._number, key, text, self._first + self._at)

    def _invalid(self, why: str) -> Invalid:
        return Invalid(self._number, why, self._first + min(self._at + 1, len(self._body)))

    def _next(self) -> str:
        """Return the next character that is no blank, or ""."""
        self._at = _BLANK.match(self._body, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
        return self._body[self._at : self._at + 1]

    def _peek(self) -> str:
        if not (found := self._next()):
            raise _NotYet
        return found

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise ValueError(f"expected {character!r}")
        self._at += 1

    def _string(self) -> str:
        if self._peek() != '"':
            raise ValueError("expected a text")
        if (found := _STRING.match(self._body, self._at)) is None:
            raise _NotYet
        self._at = found.end()
        return _decoded(found[1])

    def _value(self) -> str:
        """Return the text of a value that is complete: something follows it."""
        if self._peek() not in _VALUES:
            raise ValueError("expected a value")
        try:
            _, end = _DECODER.raw_decode(self._body, self._at)
        except ValueError:
            raise _NotYet from None  # possibly wrong: the end of the call will tell
        if self._body[end : end + 1] not in _DELIMITERS:
            raise _NotYet  # possibly a longer number
        start, self._at = self._at, end
        return self._body[start:end]


def _decoded(text: str) -> str:
    return json.loads(f'"{text}"')
