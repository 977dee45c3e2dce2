"""The bytes of an array as they are."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from rl.parameter_server.codecs.layout import Blob, contiguous, flat_bytes, from_bytes


class RawCodec:
    """The bytes in C order, nothing else. Encoding a contiguous array copies nothing: the blob is a view of it.

    The only codec without a checksum: a change that leaves the length as it was is noticed by who compares the digest
    of the shard, not here.
    """

    name = "raw"
    lossless = True
    needs_base = False

    def encode(self, array: np.ndarray, base: np.ndarray | None = None) -> Blob:
        del base
        return flat_bytes(contiguous(array)).data

    def decode(
        self, blob: Blob, *, shape: Sequence[int], dtype: DTypeLike, base: np.ndarray | None = None
    ) -> np.ndarray:
        del base
        return from_bytes(self.name, blob, shape, dtype)
