"""The protocol of a tokenizer: all that input, rollouts and serving use of one, whichever library it comes from."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from mesh.errors import UserError


class TokenizerError(UserError, ValueError):
    """A tokenizer that cannot be built, or ids that it does not have."""


class Tokenizer(Protocol):
    """Text to token ids and back. Built by `config.build()`; immutable, and safe to share between threads.

    Attributes:
        vocab_size: rows of the embedding: every id is below it.
        bos: the id that begins a text or a prompt.
        eos: the id that ends a text or an answer.
        pad: the id that fills up rows; never sampled from a text.
        digest: a checksum of everything that ids depend on (settings, and the content of files): tokenised data and
            runs are only continued with a tokenizer of the same digest.
    """

    vocab_size: int
    bos: int
    eos: int
    pad: int
    digest: str

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a text, without special ids; special tokens spelled out in the text are plain text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            TokenizerError: an id is outside 0..vocab_size-1.
        """
        ...
