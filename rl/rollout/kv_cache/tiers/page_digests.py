"""Names of pages: a chain of digests over (version, adapter) and all tokens from the first of the sequence on.

A page's keys and values depend on the weights and on every token before its end, and so does its name. The digest is
a cryptographic one: tokens may be written by strangers, who must not find two prefixes of one name.
"""

from collections.abc import Hashable, Iterator
from hashlib import blake2b

import numpy as np

_SIZE = 16  # bytes


def root_digest(key: Hashable) -> bytes:
    """Return the digest that chains of this key (version of the weights, adapter) begin with."""
    return blake2b(repr(key).encode(), digest_size=_SIZE).digest()


def next_digest(before: bytes, block: bytes) -> bytes:
    """Return the digest of a page from that of the page before it and its tokens, the bytes of int32 [page_size]."""
    return blake2b(before + block, digest_size=_SIZE).digest()


def chain(key: Hashable, tokens: np.ndarray, page_size: int) -> Iterator[bytes]:
    """Yield the digest of each full page of tokens, int32 [n] from the first, under a key (version, adapter)."""
    data, step = tokens.tobytes(), page_size * tokens.itemsize
    digest = root_digest(key)
    for start in range(0, len(data) - step + 1, step):
        digest = next_digest(digest, data[start : start + step])
        yield digest
