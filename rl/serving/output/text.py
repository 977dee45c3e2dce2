"""Text from tokens as they arrive: never half a character, never a stop string or the beginning of one.

And the tool calls of a chat model apart from its text, whole.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rl.environments.calls import CLOSING, OPENING, json_or

REPLACEMENT = "\ufffd"  # character that `decode` writes for invalid UTF-8, unfinished characters included

Decode = Callable[[Iterable[int]], str]


class TextStream:
    """The text of one completion. The pieces, joined, are the text of all tokens up to the first stop string.

    Args:
        decode: tokens to text: the bytes of the tokens joined and read as UTF-8, with U+FFFD for invalid bytes.
        stops: strings that end the text.
        included: a stop string is part of the text.
        free: tokens at the beginning within which a stop string does not count.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), *, included: bool = False, free: int = 0):
        self._decode, self._stops, self._included = decode, tuple(stops), included
        self._free, self._free_characters = free, 0  # tokens still to come, and characters of those that came
        self._pending: list[int] = []  # tokens since the last complete character
        self._given = 0  # characters of `_pending` that have been passed on
        self._held = ""  # may be the beginning of a stop string
        self._ended = False
        self.length = 0  # characters decoded so far, the held ones included

    def push(self, tokens: Sequence[int]) -> str:
        """Return the next piece: the text that more tokens make certain, perhaps none."""
        first, tokens = tokens[: self._free], tokens[self._free :]
        said = ""
        if first:
            said = self._characters(first)
            self._free, self._free_characters = self._free - len(first), self.length
            said = self._release(said, final=False)
        return said + self._release(self._characters(tokens), final=False)

    def finish(self) -> str:
        """Return the last piece: the text that was held back, now that nothing follows."""
        return self._release(self._characters((), final=True), final=True)

    def _characters(self, tokens: Iterable[int], final: bool = False) -> str:
        """Return the characters that later tokens cannot change.

        A decoder of UTF-8 reads from left to right and writes one U+FFFD for the unfinished end, so only the last
        character can still change, and only if it is that.
        """
        self._pending += tokens
        text = self._decode(self._pending)
        unfinished = not final and text.endswith(REPLACEMENT)
        new = text[self._given : len(text) - unfinished]
        self._given += len(new)
        if not unfinished:
            self._pending, self._given = [], 0
        self.length += len(new)
        return new

    def _release(self, new: str, final: bool) -> str:
        if self._ended:
            return ""
        text = self._held + new
        free = max(0, self._free_characters - self.length + len(text))  # characters at the front of it
        found = [(at, stop) for stop in self._stops if (at := text.find(stop, max(0, free + 1 - len(stop)))) >= 0]
        if found:
            self._ended = True
            return text[: min(at + len(stop) * self._included for at, stop in found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


CallStyle = Literal["tagged", "bare"]


class ToolCall(NamedTuple):
    """A call of a function: its name, and its arguments as a JSON object."""

    name: str
    arguments: str


class CallStream:
    """The text of an answer, and its calls of functions, as they arrive.

    Styles: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` among text (Hermes, Qwen), or an answer that is
    nothing but `{"name": ..., "parameters": {...}}`, perhaps several with semicolons between (Llama 3). What is no call
    of a function that the request has stays text.
    """

    def __init__(self, style: CallStyle, names: Collection[str]):
        self._style, self._names = style, frozenset(names)
        self._held = ""  # may be the beginning of a tag, or a call that has not ended
        self._inside = False
        self._plain = False  # an answer in bare style that is text
        self.count = 0  # number of calls

    def push(self, text: str) -> list[str | ToolCall]:
        """Return text and calls that are certain after more text, in order."""
        self._held += text
        return self._tagged() if self._style == "tagged" else self._bare()

    def finish(self) -> list[str | ToolCall]:
        """Return what was held back, now that nothing follows."""
        rest, self._held = self._held, ""
        if self._style == "bare" and not self._plain and (calls := self._read_all(rest)):
            self.count += len(calls)
            return [*calls]
        rest = OPENING + rest if self._inside else rest
        return self._text(rest)

    def _tagged(self) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        while True:
            before, tag, after = self._held.partition(CLOSING if self._inside else OPENING)
            if not tag:
                break
            if not self._inside:
                found += self._text(before)
            elif (call := self._checked(json_or(before, None))) is not None:
                self.count += 1
                found.append(call)
            else:
                found.append(OPENING + before + CLOSING)
            self._held, self._inside = after, not self._inside
        if not self._inside:
            keep = _overlap(self._held, OPENING)
            found += self._text(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return found

    def _bare(self) -> list[str | ToolCall]:
        self._plain = self._plain or self._held.lstrip()[:1] not in ("", "{")
        if not self._plain:
            return []
        said, self._held = self._held, ""
        return self._text(said)

    def _text(self, said: str) -> list[str | ToolCall]:
        """Return text; the white space between calls, and behind the last, is none of the answer."""
        return [said] if said and not (self.count and not said.strip()) else []

    def _read_all(self, said: str) -> list[ToolCall]:
        """Return the calls of an answer that is nothing else, otherwise none."""
        decoder, calls, at = json.JSONDecoder(), list[ToolCall](), 0
        while said[at:].strip("; \n\t"):
            at += len(said[at:]) - len(said[at:].lstrip("; \n\t"))
            try:
                value, at = decoder.raw_decode(said, at)
            except (ValueError, RecursionError):
                return []
            call = self._checked(value)
            if call is None:
                return []
            calls.append(call)
        return calls

    def _checked(self, value: Any) -> ToolCall | None:
        if not isinstance(value, Mapping):
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
