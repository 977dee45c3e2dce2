"""Watch of a draw that reads text: tokens become text as far as its characters are complete."""

from collections.abc import Sequence
from typing import Protocol

from axlearn_like.tokenizers.protocol import Tokenizer, completion_text
from rl.environments.streaming.events import Invalid
from rl.rollout.agent_loops.commands import Abort
from rl.rollout.decoding.stop_strings import INCOMPLETE

_LONGEST = 3  # tokens that may lack the rest of a character


class TextReader(Protocol):
    """Reader of the text of a draw, which comes in pieces."""

    def read(self, text: str) -> Invalid | None:
        """Read more text; returns the first place at which it can only fail, however the text was cut."""
        ...


class TextWatch:
    """Watch by a reader of text. Bytes that are no character yet wait for the next ones."""

    def __init__(self, tokenizer: Tokenizer, reader: TextReader):
        self._tokenizer, self._reader = tokenizer, reader
        self._tokens: list[int] = []
        self._read, self._length = 0, 0  # tokens whose text was read, and its characters
        self.why = ""  # reason for which the reader has ended the draw; "": it has not

    def feed(self, tokens: Sequence[int]) -> Abort | None:
        """Read tokens; the draw is kept up to the token in which the reader finds that it can only fail."""
        self._tokens += tokens
        known = len(self._tokens)
        while known > self._read and self._text(self._read, known).endswith(INCOMPLETE):
            if len(self._tokens) - known == _LONGEST:  # bytes of no character
                known = len(self._tokens)
                break
            known -= 1
        first, before, text = self._read, self._length, self._text(self._read, known)
        self._read, self._length = known, before + len(text)
        if not text or (invalid := self._reader.read(text)) is None:
            return None
        self.why = invalid.why
        ends = range(first + 1, known)
        enough = (end for end in ends if before + len(self._text(first, end).rstrip(INCOMPLETE)) >= invalid.end)
        return Abort(next(enough, known), "invalid_call")

    def _text(self, first: int, end: int) -> str:
        return completion_text(self._tokenizer, self._tokens[first:end])
