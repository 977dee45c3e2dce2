"""A tokenizer of bytes: a text is its UTF-8 bytes; three special ids follow."""

from collections.abc import Iterable
from typing import override

import xxhash

from axlearn_like.config import ConfigBase, Configurable, strip_comments, to_text
from axlearn_like.tokenizers.protocol import checked_ids


class ByteTokenizer(Configurable):
    """Ids 0..255 are bytes, 256 is `bos`, 257 is `eos`, 258 is `pad`; the rest is unused.

    It needs no file and loses nothing: `decode(encode(text)) == text` for every text that has a UTF-8 form.

    >>> from axlearn_like.tokenizers.bytes import ByteTokenizer
    >>> tokenizer = ByteTokenizer.Config().build()
    >>> tokenizer.encode("Hi")
    [72, 105]
    >>> tokenizer.decode([72, 105]), tokenizer.eos
    ('Hi', 257)
    """

    class Config(ConfigBase["ByteTokenizer"]):
        vocab_size: int = 264  # rows of the embedding: at least 259; 264 is the next multiple of 8

        @override
        def check_fields(self) -> None:
            self.require("vocab_size", self.vocab_size > 258, "259 or more: 256 bytes, bos, eos, pad")

    bos = 256
    eos = 257
    pad = 258
    stop_ids: tuple[int, ...] = (eos,)
    special_tokens: tuple[str, ...] = ()
    chat_template = None

    def __init__(self, cfg: Config):
        self.vocab_size = cfg.vocab_size
        self.digest = xxhash.xxh3_128_hexdigest(strip_comments(to_text(cfg)).encode())

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the UTF-8 bytes of `text`; special ids have no spelling."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`: special and unused ids are dropped, broken UTF-8 becomes U+FFFD.

        Raises:
            TokenizerError: an id is outside 0..vocab_size-1.
        """
        return b"".join(map(self.token_bytes, checked_ids(ids, self.vocab_size))).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the byte that a token stands for; none for special and unused ids."""
        return bytes((token,)) if 0 <= token < 256 else b""
