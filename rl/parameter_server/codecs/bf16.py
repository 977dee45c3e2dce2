"""Floats as bfloat16: half the bytes of float32 master weights, and all that a bfloat16 policy computes with."""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from rl.parameter_server.codecs.layout import (
    CHECKSUM_NBYTES,
    Blob,
    add_checksum,
    check_size,
    contiguous,
    flat_bytes,
    from_bytes,
    is_float,
    strip_checksum,
)


class Bf16Codec:
    """Codec that rounds floats to bfloat16, to nearest even as `jnp.astype` does; other dtypes are sent unchanged.

    bfloat16 arrays come back bit-exact. A NaN stays a NaN. An 8-byte checksum comes first.
    """

    name = "bf16"
    lossless = False
    needs_base = False

    def encode(self, array: np.ndarray, base: np.ndarray | None = None) -> Blob:
        """Return a checksum and the array, floats as bfloat16."""
        del base
        array = contiguous(array)
        dtype = np.dtype(ml_dtypes.bfloat16) if is_float(array.dtype) else array.dtype
        blob = np.empty(CHECKSUM_NBYTES + array.size * dtype.itemsize, np.uint8)
        if dtype == array.dtype:
            blob[CHECKSUM_NBYTES:] = flat_bytes(array)
        else:  # the cast of ml_dtypes, which is faster than integer arithmetic in numpy
            with np.errstate(invalid="ignore"):  # signalling NaNs
                blob[CHECKSUM_NBYTES:].view(dtype)[:] = array.reshape(-1)
        return add_checksum(blob)

    def decode(
        self, blob: Blob, *, shape: Sequence[int], dtype: DTypeLike, base: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the array (see `TensorCodec.decode`)."""
        del base
        body, dtype = strip_checksum(self.name, blob), np.dtype(dtype)
        if dtype == ml_dtypes.bfloat16 or not is_float(dtype):
            return from_bytes(self.name, body, shape, dtype)
        check_size(self.name, body, 2 * math.prod(shape), shape, ml_dtypes.bfloat16)
        return np.frombuffer(body, ml_dtypes.bfloat16).astype(dtype).reshape(shape)
