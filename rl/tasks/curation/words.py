"""Words of a text as curation compares them, and hashes of runs of them."""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import xxhash

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation, in the composed form of Unicode (NFKC)."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def grams(found: Sequence[str], n: int) -> np.ndarray:
    """Return the hashes of all runs of n words, each once and sorted: uint64; of all words, where there are fewer."""
    if not found:
        return np.zeros(0, np.uint64)
    last = max(1, len(found) - n + 1)
    hashes = {xxhash.xxh3_64_intdigest("\0".join(found[i : i + n]).encode()) for i in range(last)}
    return np.array(sorted(hashes), np.uint64)
