"""Lossless difference to an earlier version: which entries changed, and by how many steps of their float format.

Between two updates at the learning rates of RL few bfloat16 entries change, and most of those by one unit in the last
place. So a delta is two streams of small integers, with one of each for every changed entry: the gap to the previous
changed entry, and the distance from the old value to the new one on the number line of the format, zig-zag encoded.

    blob  = checksum of the rest, kind (1 byte), body
    dense = the bytes of the array
    delta = XXH3-128 of the result, number of changes, bytes of the gaps (8 bytes each), gaps, distances
"""

import struct
from collections.abc import Iterator, Sequence
from typing import override

import numpy as np
import xxhash
import zstandard
from numpy.typing import DTypeLike

from rl.parameter_server.codecs.frame import TensorCodec
from rl.parameter_server.codecs.layout import (
    CHECKSUM_NBYTES,
    Blob,
    add_checksum,
    contiguous,
    flat_bytes,
    from_bytes,
    is_float,
    joined,
    strip_checksum,
)
from rl.parameter_server.codecs.streams import StreamReader, StreamWriter
from rl.parameter_server.errors import WeightsError, WrongBase
from rl.parameter_server.store.buffer_pool import BUFFERS

DENSE, DELTA = 0, 1
_HEAD = struct.Struct("<16sQQ")
# Entries compared, or changes applied, at a time: few calls, and temporaries stay in cache. docs/benchmarks/weights.md
# has the times: at the least, half as many take longer, and twice as many no less.
_AT_ONCE = 1 << 19


class DeltaCodec(TensorCodec):
    """Codec of the changed entries; falls back to the whole array where that takes no more bytes.

    Any dtype: floats are ordered by value, all others by their bits as integers. Every bit counts: -0.0 and 0.0 are one
    step apart, NaNs keep their payloads.
    """

    name = "delta"
    lossless = True
    needs_base = True

    @override
    def encode(self, array: np.ndarray, base: np.ndarray | None = None) -> Blob:
        """Return the blob, at most 9 bytes longer than the array (WrongBase: none, or of another shape or dtype)."""
        array = contiguous(array)
        body = _delta(array, _fitting(base, array.shape, array.dtype))
        if sum(map(len, body)) >= array.nbytes:
            return _blob(DENSE, flat_bytes(array))
        return _blob(DELTA, *(np.frombuffer(part, np.uint8) for part in body))

    @override
    def decode(
        self, blob: Blob, *, shape: Sequence[int], dtype: DTypeLike, base: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the array (WeightsError: damaged, or another shape or dtype; WrongBase: of another `base`)."""
        content = strip_checksum(self.name, blob)
        kind, body = bytes(content[:1]), content[1:]
        if kind == bytes([DENSE]):
            return from_bytes(self.name, body, shape, dtype)
        if kind != bytes([DELTA]) or len(body) < _HEAD.size:
            raise WeightsError(f"not a delta: {len(content)} bytes of kind {kind.hex() or 'none'}")
        base = _fitting(base, tuple(shape), np.dtype(dtype))
        digest, changes, gap_bytes = _HEAD.unpack_from(body)
        result, found = BUFFERS.empty(base.shape, base.dtype), xxhash.xxh3_128()
        frames = body[_HEAD.size :]
        try:
            if changes > result.nbytes:
                raise ValueError(f"{changes} changes of {result.nbytes} bytes")
            gaps = StreamReader(frames[:gap_bytes], changes, _gap_dtype(result))
            distances = StreamReader(frames[gap_bytes:], changes, _integers(result).dtype)
            for part in _apply(base, result, gaps, distances, changes):
                found.update(part)
        except (zstandard.ZstdError, ValueError, IndexError) as error:
            raise WeightsError(f"the delta does not decode: {error}") from error
        if found.digest() != digest:
            raise WrongBase(
                "the delta was encoded against another base than the one held here, or for another dtype; "
                "the full shard has to be sent"
            )
        return result

    def digest(self, blob: Blob) -> str | None:
        """Return the XXH3-128 of the array in hexadecimal, if it is in the blob, so that `decode` verifies it."""
        content = memoryview(blob).cast("B")[CHECKSUM_NBYTES:]
        if bytes(content[:1]) != bytes([DELTA]) or len(content) <= _HEAD.size:
            return None
        return _HEAD.unpack_from(content, 1)[0].hex()


def _delta(array: np.ndarray, base: np.ndarray) -> tuple[bytes, bytes, bytes]:
    """Encode the body of a delta, in one pass over both arrays that also computes the digest of the new one."""
    new, old = _integers(array), _integers(base)
    digest = xxhash.xxh3_128()
    gaps, distances = StreamWriter(_gap_dtype(array)), StreamWriter(new.dtype)
    ordered, last = is_float(array.dtype), -1
    for first in range(0, new.size, _AT_ONCE):
        some, before = new[first : first + _AT_ONCE], old[first : first + _AT_ONCE]
        digest.update(some)
        where = _indices(some != before)
        if not len(where):
            continue
        distances.put(_distance(before[where], some[where], ordered))
        gaps.put(np.diff(where, prepend=last - first) - 1)
        last = first + int(where[-1])
    gap_frame = gaps.frame()
    head = _HEAD.pack(digest.digest(), gaps.count, len(gap_frame))
    return head, gap_frame, distances.frame()


def _indices(marks: np.ndarray) -> np.ndarray:
    """Return the indices of the few true ones of bool [entries], by eights: half the time of numpy's own search."""
    whole = len(marks) & ~7
    eights = marks[:whole].view(np.uint64)
    blocks = np.flatnonzero(eights != 0)
    inside = np.flatnonzero(eights[blocks].view(bool))
    found = (blocks[inside >> 3] << 3) + (inside & 7)
    rest = np.flatnonzero(marks[whole:])
    return np.concatenate([found, rest + whole]) if len(rest) else found


def _apply(
    base: np.ndarray, result: np.ndarray, gaps: StreamReader, distances: StreamReader, changes: int
) -> Iterator[np.ndarray]:
    """Write into `result` the array that was encoded against `base`; yield each part while it is in cache."""
    old, new, ordered = _integers(base), _integers(result), is_float(result.dtype)
    at_once = max(min(_AT_ONCE, 1 << 10), changes * _AT_ONCE // max(old.size, 1))  # changes of about _AT_ONCE entries
    done = 0
    for gap, distance in zip(gaps.some(np.int64, at_once), distances.some(new.dtype, at_once), strict=True):
        gap += 1
        where = np.cumsum(gap, out=gap)  # counted from `done` - 1
        where -= 1
        before, part = old[done : done + int(where[-1]) + 1], new[done : done + int(where[-1]) + 1]
        part[:] = before
        part[where] = _apply_steps(before[where], distance, ordered)
        yield part
        done += int(where[-1]) + 1
    for first in range(done, old.size, _AT_ONCE):
        part = new[first : first + _AT_ONCE]
        part[:] = old[first : first + _AT_ONCE]
        yield part


def _distance(old: np.ndarray, new: np.ndarray, ordered: bool) -> np.ndarray:
    """Return the steps from old to new, never 0, zig-zag: -1, 1, -2, 2 ... are 0, 1, 2, 3 ... of their width."""
    steps = _line(new, ordered)
    steps -= _line(old, ordered)  # modulo 2^bits, like everything below
    signs = steps >> (8 * steps.itemsize - 1)
    steps <<= 1
    steps ^= signs
    codes = steps.view(new.dtype)
    codes -= 1
    return codes


def _apply_steps(old: np.ndarray, codes: np.ndarray, ordered: bool) -> np.ndarray:
    """Return the new values: the inverse of `_distance`. Overwrites `codes`."""
    codes += 1
    steps = (codes >> 1).view(_signed(codes.dtype))
    steps ^= -(codes & 1).view(steps.dtype)
    steps += _line(old, ordered)
    return _line(steps, ordered).view(old.dtype)


def _line(integers: np.ndarray, ordered: bool) -> np.ndarray:
    """Map the bits of floats to signed integers of the same order, in which neighbours are 1 apart; a copy.

    A float's bits are a sign and a magnitude. Flipping all but the sign of the negative ones makes them two's
    complement, with -0.0 at -1. The map is its own inverse.
    """
    signed = integers.view(_signed(integers.dtype))
    if not ordered:
        return signed.copy()
    line = signed >> (8 * signed.itemsize - 1)
    line &= np.iinfo(signed.dtype).max
    line ^= signed
    return line


def _integers(array: np.ndarray) -> np.ndarray:
    """Return a flat view as unsigned integers of the entries' width, or as bytes if there are none of that width."""
    width = array.dtype.itemsize
    return array.reshape(-1).view(f"u{width}" if width in (1, 2, 4, 8) else np.uint8)


def _signed(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"i{dtype.itemsize}")


def _gap_dtype(array: np.ndarray) -> np.dtype:
    return np.dtype(np.uint32 if array.nbytes < 2**32 else np.uint64)


def _fitting(base: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if base is None:
        raise WrongBase(f"a delta of {dtype.name}{list(shape)} needs the array it is added to; there is none")
    base = contiguous(base)
    if (base.shape, base.dtype) != (shape, dtype):
        held = f"{base.dtype.name}{list(base.shape)}"
        raise WrongBase(f"a delta of {dtype.name}{list(shape)} does not fit a base of {held}")
    return base


def _blob(kind: int, *parts: np.ndarray) -> memoryview:
    return add_checksum(joined(np.array([kind], np.uint8), *parts))
