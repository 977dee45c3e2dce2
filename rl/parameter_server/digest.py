"""The digest of bytes, by which damage on the way is seen."""

from typing import Any

import numpy as np
import xxhash


def digest_of(data: Any) -> str:
    """XXH3-128 of an array's bytes (in C order) or of a buffer: against accidents, not against malice."""
    if isinstance(data, np.ndarray):
        data = as_bytes(data)
    return xxhash.xxh3_128_hexdigest(data)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """uint8, flat; a view where the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
