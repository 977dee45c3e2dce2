"""Streams of small integers as bytes, with the few large ones at the end, compressed by Zstandard as entropy coder.

Integers of 255 and more are an escape in the bytes. After all bytes they follow in full, in planes: the lowest byte of
each, then the next, so that the high bytes, mostly zeros, compress to almost nothing.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import zstandard
from numpy.typing import DTypeLike

_LEVEL = 1  # level of Zstandard: 3 takes longer and gains nothing on such streams
_ESCAPE = 255


@dataclasses.dataclass(slots=True)
class StreamWriter:
    """Encoder of integers in chunks; `frame` returns the compressed stream."""

    dtype: np.dtype  # unsigned, wide enough for all
    count: int = 0
    _codes: list[np.ndarray] = dataclasses.field(default_factory=list)
    _escaped: list[np.ndarray] = dataclasses.field(default_factory=list)

    def put(self, values: np.ndarray) -> None:
        """Append integers."""
        codes = np.minimum(values, _ESCAPE).astype(np.uint8)
        self._codes.append(codes)
        self._escaped.append(values[codes == _ESCAPE].astype(self.dtype))
        self.count += len(codes)

    def frame(self) -> bytes:
        """Return the compressed stream of all integers."""
        escaped = np.concatenate([np.empty(0, self.dtype), *self._escaped])
        planes = escaped.view(np.uint8).reshape(-1, self.dtype.itemsize).T
        data = np.concatenate([*self._codes, planes.reshape(-1)])
        return zstandard.ZstdCompressor(level=_LEVEL).compress(data.data)


class StreamReader:
    """Decoder of the integers of a frame, in chunks.

    Raises:
        ValueError, ZstdError: the frame does not hold `count` integers of this dtype.
    """

    def __init__(self, frame: memoryview, count: int, dtype: np.dtype):
        size = zstandard.frame_content_size(frame)
        if not count <= size <= count * (1 + dtype.itemsize):
            raise ValueError(f"{size} bytes cannot be {count} changes")
        data = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
        self._codes, planes = data[:count], data[count:].reshape(dtype.itemsize, -1)
        self._escaped = np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
        if np.count_nonzero(self._codes == _ESCAPE) != len(self._escaped):
            raise ValueError(f"{len(self._escaped)} escapes for {count} changes do not match their codes")

    def some(self, dtype: DTypeLike, at_once: int) -> Iterator[np.ndarray]:
        """Yield the integers, at most `at_once` at a time."""
        taken = 0
        for first in range(0, len(self._codes), at_once):
            codes = self._codes[first : first + at_once]
            values, where = codes.astype(dtype), np.flatnonzero(codes == _ESCAPE)
            values[where] = self._escaped[taken : taken + len(where)]
            taken += len(where)
            yield values
