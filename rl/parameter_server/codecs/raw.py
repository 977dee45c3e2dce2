"""The bytes of an array, unchanged."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from rl.parameter_server.codecs.layout import Blob, contiguous, flat_bytes, from_bytes


class RawCodec:
    """Codec of the bytes in C order, nothing else. Encoding a contiguous array copies nothing: the blob is a view.

    The only codec without a checksum: damage that keeps the length is detected by the digest of the shard, not here.
    """

    name = "raw"
    lossless = True
    needs_base = False

    def encode(self, array: np.ndarray, base: np.ndarray | None = None) -> Blob:
        """Return the bytes in C order; a view where the array is contiguous."""
        del base
        return flat_bytes(contiguous(array)).data

    def decode(
        self, blob: Blob, *, shape: Sequence[int], dtype: DTypeLike, base: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the array (see `TensorCodec.decode`)."""
        del base
        return from_bytes(self.name, blob, shape, dtype)
