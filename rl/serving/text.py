"""Text from tokens as they arrive: never half a character, never a stop string or the beginning of one."""

from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"  # what `decode` writes for bytes that are no UTF-8, an unfinished character among them

Decode = Callable[[Iterable[int]], str]


class TextStream:
    """The text of one completion. The pieces, joined, are the text of all tokens up to the first stop string.

    Args:
        decode: tokens to text: the bytes of the tokens joined and read as UTF-8, with U+FFFD for invalid bytes.
        stops: strings that end the text and are not part of it.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()):
        self._decode, self._stops = decode, tuple(stops)
        self._pending: list[int] = []  # since the last token that ended a character
        self._given = 0  # characters of `_pending` that have been passed on
        self._held = ""  # may be the beginning of a stop string
        self._ended = False
        self.length = 0  # characters decoded so far, the held ones included

    def push(self, tokens: Iterable[int]) -> str:
        """Return the next piece: the text that more tokens make certain, perhaps none."""
        return self._release(self._characters(tokens), final=False)

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
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self._ended = True
            return text[: min(found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
