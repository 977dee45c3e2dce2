"""A small trained tokenizer: bytes, and one token for each phrase that recurs in the training texts.

A family of tasks asks the same question with different numbers. Encoding "State the final answer to the following
arithmetic problem: " as one token instead of sixty makes every stage of a small run several times cheaper, and keeps
digits and letters, which the answer depends on, as single bytes.
"""

import re
from typing import override

from axlearn_like.tokenizers.bytes import ByteTokenizer


class PhraseTokenizer(ByteTokenizer):
    """Ids 0..258 are those of `ByteTokenizer`, 259 + i is `phrases[i]`; the longest phrase that matches is taken.

    >>> from axlearn_like.tokenizers.phrases import PhraseTokenizer
    >>> tokenizer = PhraseTokenizer.Config(phrases=("The answer is",)).build()
    >>> tokenizer.encode("The answer is 4")
    [259, 32, 52]
    """

    class Config(ByteTokenizer.Config):
        phrases: tuple[str, ...] = ()
        vocab_size: int = 272

        @override
        def check_fields(self) -> None:
            super().check_fields()
            distinct = len(set(self.phrases)) == len(self.phrases) and "" not in self.phrases
            self.require("phrases", distinct, "different phrases, none of them empty")
            least = 259 + len(self.phrases)
            self.require("vocab_size", self.vocab_size >= least, f"{least} or more with {len(self.phrases)} phrases")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        first = self.pad + 1
        self._ids = {phrase: first + i for i, phrase in enumerate(cfg.phrases)}
        self._texts = {i: phrase.encode() for phrase, i in self._ids.items()}
        longest_first = sorted(cfg.phrases, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if cfg.phrases else None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return ids of phrases where they occur, and of bytes elsewhere."""
        if self._split is None:
            return super().encode(text)
        ids: list[int] = []
        for piece in self._split.split(text):
            ids += [self._ids[piece]] if piece in self._ids else super().encode(piece)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a phrase, or the one that a token stands for."""
        return self._texts.get(token) or super().token_bytes(token)
