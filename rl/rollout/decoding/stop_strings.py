"""Stop strings: the number of tokens after which a completion's text contains one.

A stop string may span tokens, and end in the middle of one. The completion is cut behind that token, never inside it,
so that tokens, log-probabilities and masks stay aligned.
"""

from collections.abc import Callable, Sequence

from mesh import UserError

# Characters at the front of a text that may differ when the tokens before it are left out: the bytes of a character
# cut in two (at most 3), a blank that a tokenizer drops at the start of a text, with room to spare. One more may be
# unfinished at the end of the text that was searched before.
MARGIN = 8
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StopText:
    """Search for the first token at whose end a completion's text contains one of `strings`.

    `decode` gives the text of tokens. It may drop tokens (special ones), and show a character whose bytes are not all
    there yet as U+FFFD; apart from that, more tokens must only lengthen the text.

    Raises:
        UserError: an empty string, or one with U+FFFD, which text shows only until the character is complete.
    """

    def __init__(self, strings: tuple[str, ...], decode: Callable[[Sequence[int]], str]):
        check_strings(strings, has_text=True)
        self._strings = strings
        self._decode = decode
        self._enough = max(map(len, strings), default=0) + MARGIN

    def find(self, tokens: Sequence[int], start: int) -> int | None:
        """Return the least number of tokens, more than `start`, whose text ends a stop string; None if there is none.

        A string that was complete before `start` does not count: an agent loop goes on behind it. Only a tail is
        decoded: `tokens[start:]` and the tokens before it in which a stop string could begin.

        Args:
            tokens: all of the completion so far.
            start: tokens that were searched before, or are not to be.
        """
        if not self._strings or start >= len(tokens):
            return None
        first = self._tail(tokens, start)
        if not self._holds(tokens[first:], 0):
            return None
        # A character that is complete only with the next token counts as new.
        old = len(self._decode(tokens[first:start]).rstrip(INCOMPLETE)) if start else 0
        return next((end for end in range(start + 1, len(tokens) + 1) if self._holds(tokens[first:end], old)), None)

    def _tail(self, tokens: Sequence[int], start: int) -> int:
        """Return the index from which the text up to `start` is as long as a stop string and the margin, or 0."""
        length = self._enough  # limit in tokens: enough if each has a character
        while length < start and len(self._decode(tokens[start - length : start])) < self._enough:
            length *= 2
        return max(0, start - length)

    def _holds(self, tokens: Sequence[int], old: int) -> bool:
        """Return True if their text has a stop string that ends behind the first `old` characters."""
        text = self._decode(tokens)
        return any(text.find(string, max(0, old + 1 - len(string))) >= 0 for string in self._strings)


def check_strings(strings: Sequence[str], *, has_text: bool, where: str = "") -> None:
    """Refuse empty strings, those with U+FFFD, and any without text to search; `where` begins the UserError."""
    where = f"{where}: " if where else ""
    if strings and not has_text:
        raise UserError(f"{where}stop strings need an engine that was built with a tokenizer's `decode`")
    for string in strings:
        if not string or INCOMPLETE in string:
            raise UserError(f"{where}stop string {string!r}: expected at least one character, and none that is U+FFFD")
