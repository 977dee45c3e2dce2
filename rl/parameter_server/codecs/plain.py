"""Codecs that keep entries one by one: as they are, or as bfloat16."""

import math
from collections.abc import Sequence
from typing import override

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from rl.parameter_server.codecs.frame import FloatCodec, TensorCodec
from rl.parameter_server.codecs.layout import (
    CHECKSUM_NBYTES,
    Blob,
    check_size,
    contiguous,
    flat_bytes,
    from_bytes,
    joined,
)


class RawCodec(TensorCodec):
    """Codec of the bytes in C order, nothing else. Encoding a contiguous array copies nothing: the blob is a view.

    The only codec without a checksum: damage that keeps the length is detected by the digest of the shard, not here.
    """

    name = "raw"
    lossless = True

    @override
    def encode(self, array: np.ndarray, base: np.ndarray | None = None) -> Blob:
        return flat_bytes(contiguous(array)).data

    @override
    def decode(
        self, blob: Blob, *, shape: Sequence[int], dtype: DTypeLike, base: np.ndarray | None = None
    ) -> np.ndarray:
        return from_bytes(self.name, blob, shape, dtype)


class Bf16Codec(FloatCodec):
    """Codec that rounds floats to bfloat16, to nearest even as `jnp.astype` does: all that such a policy computes with.

    bfloat16 arrays come back bit-exact. A NaN stays a NaN.
    """

    name = "bf16"

    @override
    def encode_floats(self, array: np.ndarray) -> np.ndarray:
        if array.dtype == ml_dtypes.bfloat16:
            return joined(flat_bytes(array))
        blob = np.empty(CHECKSUM_NBYTES + 2 * array.size, np.uint8)
        with np.errstate(invalid="ignore"):  # signalling NaNs; the cast is faster than integer arithmetic in numpy
            blob[CHECKSUM_NBYTES:].view(ml_dtypes.bfloat16)[:] = array.reshape(-1)
        return blob

    @override
    def decode_floats(self, body: memoryview, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if dtype == ml_dtypes.bfloat16:
            return from_bytes(self.name, body, shape, dtype)
        check_size(self.name, body, 2 * math.prod(shape), shape, ml_dtypes.bfloat16)
        return np.frombuffer(body, ml_dtypes.bfloat16).astype(dtype).reshape(shape)
