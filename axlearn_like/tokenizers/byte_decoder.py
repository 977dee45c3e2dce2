"""The bytes of each token, from the decoder that a tokenizer.json describes.

Text is the bytes of its tokens, joined: so a character that two tokens share is never lost, and a piece of a completion
needs no token before it. Decoders for which this does not hold (WordPiece's, which puts blanks between words) are
refused.
"""

import re
from typing import Any

from axlearn_like.tokenizers.protocol import TokenizerError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN = "ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip, as of language models"


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in which byte-level encodings write their tokens.

    Printable characters of Latin-1 stand for themselves, and 256, 257, ... for the other bytes in their order
    (Radford et al. 2019, GPT-2).
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteDecoder:
    """A decoder as a function of one token; `drops_blank`: a text loses the blank that encoding put before it."""

    def __init__(self, spec: Any, where: str):
        """`spec`: the field `decoder` of a tokenizer.json."""
        self._replace: list[tuple[str, str]] = []
        self._alphabet: dict[str, int] | None = None
        self._byte_fallback = self.drops_blank = False
        steps = spec.get("decoders", []) if isinstance(spec, dict) and spec.get("type") == "Sequence" else [spec]
        for step in steps:
            if not isinstance(step, dict) or not self._add(step):
                kind = step.get("type") if isinstance(step, dict) else step
                raise TokenizerError(
                    f"{where}: its decoder has {kind!r}, whose text depends on more than the token's own bytes; "
                    f"expected {_KNOWN}"
                )

    def _add(self, step: dict[str, Any]) -> bool:
        """Take a step of the decoder; returns False if it is not known."""
        match step:
            case {"type": "ByteLevel"}:
                self._alphabet = byte_alphabet()
            case {"type": "Metaspace"}:
                self._replace.append((step.get("replacement", "▁"), " "))
                self.drops_blank |= step.get("prepend_scheme", "always") != "never"
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replace.append((old, new))
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                self.drops_blank |= start == 1
            case _:
                return False
        return True

    def token(self, text: str) -> bytes:
        """Return the bytes of a token as the vocabulary writes it."""
        if self._byte_fallback and (found := _BYTE.fullmatch(text)):
            return bytes.fromhex(found[1])
        for old, new in self._replace:
            text = text.replace(old, new)
        if self._alphabet is not None and all(character in self._alphabet for character in text):
            return bytes(self._alphabet[character] for character in text)
        return text.encode("utf-8")
