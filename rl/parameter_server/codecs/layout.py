"""Byte layout shared by the codecs: arrays as bytes and back, and the checksum at the start of a blob."""

import struct
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import xxhash
from numpy.typing import DTypeLike

from rl.parameter_server.errors import WeightsError
from rl.parameter_server.store.buffer_pool import BUFFERS

type Blob = bytes | bytearray | memoryview

_CHECKSUM = struct.Struct("<Q")
CHECKSUM_NBYTES = _CHECKSUM.size  # bytes before the body


def contiguous(array: np.ndarray) -> np.ndarray:
    """Return the array in C order and native byte order, perhaps itself (WeightsError: its dtype has references)."""
    if array.dtype.hasobject:
        raise WeightsError(f"an array of dtype {array.dtype} cannot be encoded; expected numbers")
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    return np.asarray(array, native, order="C")  # ascontiguousarray would give a scalar an axis


def flat_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of a contiguous array, uint8 [nbytes], as a view."""
    return array.reshape(-1).view(np.uint8)


def is_float(dtype: np.dtype) -> bool:
    """Return True for real floats of any width, including 8-bit ones."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def from_bytes(codec: str, body: Blob, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Return a new array with these bytes (WeightsError: the number of bytes is not that of such an array)."""
    array = BUFFERS.empty(shape, dtype)
    check_size(codec, body, array.nbytes, shape, dtype)
    flat_bytes(array)[:] = np.frombuffer(body, np.uint8)
    return array


def check_size(codec: str, body: Blob, expected: int, shape: Sequence[int], dtype: DTypeLike) -> None:
    """Raise WeightsError unless the body has as many bytes as an array of this shape and dtype takes."""
    if len(body) != expected:
        what = f"{np.dtype(dtype).name}[{', '.join(map(str, shape))}]"
        raise WeightsError(
            f"{codec} weights are cut short or of another array: {len(body)} bytes for {what}, expected {expected}"
        )


def joined(*parts: np.ndarray) -> np.ndarray:
    """Return the blob of these parts of a body, uint8 each, behind room for the checksum."""
    return np.concatenate([np.zeros(CHECKSUM_NBYTES, np.uint8), *parts])


def add_checksum(blob: np.ndarray) -> memoryview:
    """Write the checksum (XXH3, 64 bits) of a blob's body into its first 8 bytes; the blob is uint8 [8 + body]."""
    _CHECKSUM.pack_into(blob.data, 0, xxhash.xxh3_64_intdigest(blob[CHECKSUM_NBYTES:]))
    return blob.data


def strip_checksum(codec: str, blob: Blob) -> memoryview:
    """Verify the checksum of a blob and return its body (WeightsError: the body does not match the checksum)."""
    view = memoryview(blob).cast("B")
    body = view[CHECKSUM_NBYTES:]
    if len(view) < CHECKSUM_NBYTES or _CHECKSUM.unpack_from(view)[0] != xxhash.xxh3_64_intdigest(body):
        raise WeightsError(f"{codec} weights are damaged: {len(view)} bytes arrived that do not match their checksum")
    return body
