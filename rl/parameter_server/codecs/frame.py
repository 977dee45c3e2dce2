"""The interface of tensor codecs, and the frame of those for floats: a checksum, and a body that the codec makes."""

import abc
import math
import struct
from collections.abc import Sequence
from typing import ClassVar, override

import numpy as np
import zstandard
from numpy.typing import DTypeLike

from rl.parameter_server.codecs.layout import (
    Blob,
    add_checksum,
    contiguous,
    flat_bytes,
    from_bytes,
    is_float,
    joined,
    strip_checksum,
)
from rl.parameter_server.errors import WeightsError


class TensorCodec(abc.ABC):
    """Encoding of one array. Codecs are stateless and thread-safe."""

    name: ClassVar[str]  # the name by which `get_codec` finds it
    lossless: ClassVar[bool]  # every array of every dtype comes back bit-exact
    needs_base: ClassVar[bool] = False  # both ends must hold an earlier array of the same shape and dtype

    @abc.abstractmethod
    def encode(self, array: np.ndarray, base: np.ndarray | None = None) -> Blob:
        """Return the encoded bytes, perhaps a view of `array` (WeightsError: not encodable, or no base that fits)."""

    @abc.abstractmethod
    def decode(
        self, blob: Blob, *, shape: Sequence[int], dtype: DTypeLike, base: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the array, C-contiguous, writable, on its own (WeightsError: damaged, or of another; WrongBase)."""


class FloatCodec(TensorCodec):
    """Codec that approximates floats; arrays of other dtypes are sent unchanged. An 8-byte checksum comes first."""

    lossless = False

    @abc.abstractmethod
    def encode_floats(self, array: np.ndarray) -> np.ndarray:
        """Return the blob of floats, not empty, uint8 with room for the checksum (WeightsError: names the entry)."""

    @abc.abstractmethod
    def decode_floats(self, body: memoryview, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the array of a body whose checksum is right (ValueError or WeightsError: it is of another array)."""

    @override
    def encode(self, array: np.ndarray, base: np.ndarray | None = None) -> Blob:
        array = contiguous(array)
        approximated = is_float(array.dtype) and array.size > 0
        return add_checksum(self.encode_floats(array) if approximated else joined(flat_bytes(array)))

    @override
    def decode(
        self, blob: Blob, *, shape: Sequence[int], dtype: DTypeLike, base: np.ndarray | None = None
    ) -> np.ndarray:
        body, dtype = strip_checksum(self.name, blob), np.dtype(dtype)
        if not is_float(dtype) or not math.prod(shape):
            return from_bytes(self.name, body, shape, dtype)
        try:
            return self.decode_floats(body, tuple(shape), dtype)
        except (struct.error, ValueError, zstandard.ZstdError) as error:
            raise WeightsError(f"{self.name} weights are damaged or of another array: {error}") from error
