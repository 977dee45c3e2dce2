"""Prompts in segments: fixed text, and placeholders whose text is another one in each request."""

from collections.abc import Iterable
from typing import NamedTuple


class TextSegment(NamedTuple):
    """A part of a prompt's text."""

    text: str
    placeholder: str = ""  # name of what fills it; "": fixed text of the template


class TokenSegment(NamedTuple):
    """A segment as tokens."""

    tokens: int  # number of tokens
    placeholder: str = ""  # name, or ""


class SegmentedText(str):
    """A text that knows its segments.

    >>> from rl.protocol.segments import TextSegment, SegmentedText
    >>> text = SegmentedText((TextSegment("Question: "), TextSegment("2 + 2?", "question")))
    >>> text, [one.placeholder for one in text.segments]
    ('Question: 2 + 2?', ['', 'question'])
    """

    segments: tuple[TextSegment, ...]

    def __new__(cls, segments: Iterable[TextSegment]) -> "SegmentedText":
        """Join the texts of segments."""
        parts = tuple(segments)
        text = super().__new__(cls, "".join(part.text for part in parts))
        text.segments = parts
        return text

    def __getnewargs__(self) -> tuple[tuple[TextSegment, ...]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return what makes a copy, in this process or another."""
        return (self.segments,)
