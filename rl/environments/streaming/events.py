"""Events of the calls in an action that is still being drawn.

A call form gives the events of a text; those of a longer text only continue them. `number` counts the calls of the
action, `end` the characters up to which the text must be known.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Started(NamedTuple):
    """A call of which the tool is known."""

    number: int
    tool: str
    end: int


class ArgumentPart(NamedTuple):
    """More of an argument: a whole line of a text, or what is left at its end; of other values all of the JSON."""

    number: int
    name: str  # the argument's; "" where the form writes the only one without its name
    text: str
    end: int


class Finished(NamedTuple):
    """A call that is complete; `source` is its text with the marks around it."""

    number: int
    source: str
    end: int


class Invalid(NamedTuple):
    """Text that nothing can turn into a call that succeeds."""

    number: int
    why: str
    end: int


Event = Started | ArgumentPart | Finished | Invalid


_HEAD = 64  # characters in which a head must end


class Marks(NamedTuple):
    """Form of such calls."""

    # `opening`, `closing`: around a call
    opening: str
    closing: str
    head: re.Pattern[str]  # pattern behind `opening`; its first group is the tool
    head_ends: str  # the last character of a head
    strips: bool  # blanks around the argument are not part of it


def tag_events(text: str, marks: Marks) -> Iterator[Event]:
    """Yield the events of a text."""
    number, at = 0, 0
    while (start := text.find(marks.opening, at)) >= 0:
        first = start + len(marks.opening)
        if text.find(marks.head_ends, first, first + _HEAD) < 0 and len(text) < first + _HEAD:
            return  # head is not complete
        if (head := marks.head.match(text, first)) is None:
            at = start + 1
            continue
        yield Started(number, head[1], head.end())
        closing = text.find(marks.closing, head.end())
        yield from _parts(text, number, head.end(), closing, marks)
        if closing < 0:
            return
        at = closing + len(marks.closing)
        yield Finished(number, text[start:at], at)
        number += 1


def _parts(text: str, number: int, first: int, closing: int, marks: Marks) -> Iterator[ArgumentPart]:
    """Yield the lines of an argument; `closing` is the place of the closing mark, or -1."""
    # A line end may be the first character of the closing mark: the next ones decide.
    known = closing if closing >= 0 else len(text) - len(marks.closing) + 1
    if marks.strips:
        first += len(text[first:known]) - len(text[first:known].lstrip())
    while (newline := text.find("\n", first, known)) >= 0:
        yield ArgumentPart(number, "", text[first : newline + 1], newline + 1)
        first = newline + 1
    if closing >= 0:
        rest = text[first:closing]
        yield ArgumentPart(number, "", rest.rstrip() if marks.strips else rest, closing)
