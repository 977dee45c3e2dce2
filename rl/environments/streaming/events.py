"""Events of the calls in an action that is still being drawn.

A call form gives the events of a text; those of a longer text only continue them. `number` counts the calls of the
action, `end` the characters up to which the text must be known.
"""

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
