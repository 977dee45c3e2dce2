"""Texts that stand behind others: their ids are those that the whole text has there.

Tokenizers made by SentencePiece put a blank before a text. A piece that is encoded alone gets it too, though inside a
text there is none: `the` for `▁the` is another token, and a policy trained on one is not asked for by the other
(huggingface/transformers#26273, #31513).
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence

from axlearn_like.tokenizers.protocol import Tokenizer

_SEEN = 8  # tokens before a text that are encoded with it
_OTHERS = ("\n", "a", "1", ".")  # replacements if a token would span the border


def encode_inside(tokenizer: Tokenizer, text: str, behind: Sequence[int] = (), *, special: bool = False) -> list[int]:
    """Return the ids of a text that stands behind others.

    Args:
        behind: ids of what is before it, of which the last few count; (): some plain text.
        special: special tokens spelled out in the text are themselves, see `Tokenizer.encode`.
    """
    parsed = special or not either(tokenizer.special_tokens).search(text)
    for before in ([_spelled(tokenizer, behind)] if parsed else []) + [*_OTHERS]:
        given = list(tokenizer.encode(before, special=parsed))
        ids = list(tokenizer.encode(before + text, special=parsed))
        if given and ids[: len(given)] == given:
            return ids[len(given) :]
    return list(tokenizer.encode(text, special=special))


def either(texts: Iterable[str]) -> re.Pattern[str]:
    """Return the expression for any of these texts, the longest first; with none, nothing matches."""
    return _compiled(frozenset(texts))


@functools.lru_cache(maxsize=16)
def _compiled(texts: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _spelled(tokenizer: Tokenizer, behind: Sequence[int]) -> str:
    """Return the text of the last ids, from the last special token on; "" if it would be read in another way."""
    names, text = _names(tokenizer), b""
    for token in reversed(behind[-_SEEN:]):
        plain = tokenizer.token_bytes(int(token))
        if not plain:
            begin = names.get(int(token), "")
            break
        text = plain + text
    else:
        begin = ""
    plainly = text.decode("utf-8", errors="ignore")
    return "" if either(tokenizer.special_tokens).search(plainly) else begin + plainly


@functools.lru_cache(maxsize=16)
def _names(tokenizer: Tokenizer) -> Mapping[int, str]:
    """Return the spelling of each special id, but for the one of characters that are unknown."""
    unknown = tokenizer.encode("\U0010fffd")
    found = {text: tokenizer.encode(text, special=True) for text in tokenizer.special_tokens}
    return {ids[0]: text for text, ids in found.items() if len(ids) == 1 and ids[0] not in unknown}
