"""Lossless difference to an earlier version: which entries changed, and by how many steps of their float format.

Between two updates at the learning rates of RL few bfloat16 entries change, and most of those by one unit in the last
place. So a delta is two streams of small integers, with one of each for every changed entry: the gap to the previous
changed entry, and the distance from the old value to the new one on the number line of the format, zig-zag encoded.
Where more than one in a hundred of many 16-bit entries changes, there are codes of two bits for all of them instead
(`steps.py`), which take several times fewer CPU seconds and a few more bytes.

    blob  = checksum of the rest, kind (1 byte), body
    dense = the bytes of the array
    delta = checksum of the base, of the result, number of changes, bytes of the gaps (8 bytes each), gaps, distances
    steps = checksum of the base (8 bytes), XXH3-128 of the result, number of exceptions (8 bytes), codes, exceptions
"""

import struct
from collections.abc import Sequence

import numpy as np
import xxhash
import zstandard
from numpy.typing import DTypeLike

from rl.parameter_server.codecs.layout import (
    CHECKSUM_NBYTES,
    Blob,
    add_checksum,
    contiguous,
    flat_bytes,
    from_bytes,
    is_float,
    strip_checksum,
)
from rl.parameter_server.codecs.steps import apply_steps, changed_share, find_exceptions, find_steps, length_of
from rl.parameter_server.codecs.streams import StreamReader, StreamWriter
from rl.parameter_server.errors import WeightsError, WrongBase
from rl.parameter_server.store.buffer_pool import BUFFERS

DENSE, DELTA, STEPS = 0, 1, 2
_HEAD = struct.Struct("<QQQQ")
_STEPS_HEAD = struct.Struct("<Q16sQQ")  # the last: bytes of the frame of codes
_STEPS_LEAST = 1 << 20  # entries
_STEPS_SHARE = 0.01  # of entries that change
_LEVEL = 1  # of Zstandard, for codes
_OTHER_BASE = "the delta was encoded against another base than the one held here; the full shard has to be sent"
_OTHER_RESULT = "the delta did not decode to what was encoded; is the dtype the same on both sides?"
_AT_ONCE = 1 << 18  # entries compared, or changes applied, at a time: temporaries stay in cache


class DeltaCodec:
    """Codec of the changed entries; falls back to the whole array where that takes no more bytes.

    Any dtype: floats are ordered by value, all others by their bits as integers. Every bit counts: -0.0 and 0.0 are one
    step apart, NaNs keep their payloads.
    """

    name = "delta"
    lossless = True
    needs_base = True

    def encode(self, array: np.ndarray, base: np.ndarray | None = None) -> Blob:
        """Return the blob, at most 9 bytes longer than the array.

        Raises:
            WrongBase: there is no base, or it has another shape or dtype.
        """
        array = contiguous(array)
        base = _fitting(base, array.shape, array.dtype)
        kind, encode = (STEPS, _steps) if _many_change(array, base) else (DELTA, _delta)
        body = encode(array, base)
        if sum(map(len, body)) >= array.nbytes:
            return _blob(DENSE, flat_bytes(array))
        return _blob(kind, *(np.frombuffer(part, np.uint8) for part in body))

    def decode(
        self, blob: Blob, *, shape: Sequence[int], dtype: DTypeLike, base: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the array.

        Raises:
            WeightsError: the blob is damaged, or of another shape or dtype.
            WrongBase: `base` is not the array that the delta was encoded against. (A dense blob needs no base.)
        """
        content = strip_checksum(self.name, blob)
        kind, body = bytes(content[:1]), content[1:]
        if kind == bytes([DENSE]):
            return from_bytes(self.name, body, shape, dtype)
        if kind not in (bytes([DELTA]), bytes([STEPS])) or len(body) < _HEAD.size:
            raise WeightsError(f"not a delta: {len(content)} bytes of kind {kind.hex() or 'none'}")
        base = _fitting(base, tuple(shape), np.dtype(dtype))
        if kind == bytes([STEPS]):
            return _apply_body(body, base)
        base_sum, result_sum, changes, gap_bytes = _HEAD.unpack_from(body)
        result = BUFFERS.empty(base.shape, base.dtype)
        if _copy(flat_bytes(base), flat_bytes(result)) != base_sum:
            raise WrongBase(_OTHER_BASE)
        frames = body[_HEAD.size :]
        try:
            if changes > result.nbytes:
                raise ValueError(f"{changes} changes of {result.nbytes} bytes")
            gaps = StreamReader(frames[:gap_bytes], changes, _gap_dtype(result))
            distances = StreamReader(frames[gap_bytes:], changes, _integers(result).dtype)
            _apply(result, gaps, distances)
        except (zstandard.ZstdError, ValueError, IndexError) as error:
            raise WeightsError(f"the delta does not decode: {error}") from error
        if xxhash.xxh3_64_intdigest(flat_bytes(result)) != result_sum:
            raise WeightsError(_OTHER_RESULT)
        return result

    def digest(self, blob: Blob) -> str | None:
        """Return the XXH3-128 of the array in hexadecimal, if it is in the blob, so that `decode` verifies it."""
        body = memoryview(blob).cast("B")[CHECKSUM_NBYTES:]
        if bytes(body[:1]) != bytes([STEPS]) or len(body) < 1 + _STEPS_HEAD.size:
            return None
        return _STEPS_HEAD.unpack_from(body, 1)[1].hex()


def _many_change(array: np.ndarray, base: np.ndarray) -> bool:
    """Return True if codes for all entries cost less than a list of those that change."""
    if array.itemsize != 2 or array.size < _STEPS_LEAST:
        return False
    return changed_share(_integers(array), _integers(base)) > _STEPS_SHARE


def _steps(array: np.ndarray, base: np.ndarray) -> tuple[Blob, ...]:
    """Encode the body of a blob of steps; as long as the array if there are too many exceptions."""
    new, old = _integers(array), _integers(base)
    codes = find_steps(new, old)
    where = find_exceptions(codes, new.size)
    if len(where) > new.size // 4:
        return (flat_bytes(array).data,)
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(codes.data)
    exceptions = zstandard.ZstdCompressor(level=_LEVEL).compress(new[where].data)
    base_sum, result = xxhash.xxh3_64_intdigest(flat_bytes(base)), xxhash.xxh3_128_digest(flat_bytes(array))
    return _STEPS_HEAD.pack(base_sum, result, len(where), len(frame)), frame, exceptions


def _apply_body(body: memoryview, base: np.ndarray) -> np.ndarray:
    """Decode the body of a blob of steps. Raises as `DeltaCodec.decode`."""
    base_sum, digest, count, frame_bytes = _STEPS_HEAD.unpack_from(body)
    frames, found = body[_STEPS_HEAD.size :], xxhash.xxh3_128()
    result = BUFFERS.empty(base.shape, base.dtype)
    try:
        if result.itemsize != 2:
            raise ValueError(f"steps of {result.itemsize * 8}-bit entries")
        codes = np.frombuffer(_unpack(frames[:frame_bytes], length_of(result.size)), np.uint8)
        exceptions = np.frombuffer(_unpack(frames[frame_bytes:], 2 * count), np.uint16)
        for part in apply_steps(codes, _integers(base), exceptions, _integers(result)):
            found.update(part)
    except (zstandard.ZstdError, ValueError, IndexError) as error:
        raise WeightsError(f"the delta does not decode: {error}") from error
    if found.digest() != digest:
        if xxhash.xxh3_64_intdigest(flat_bytes(base)) != base_sum:
            raise WrongBase(_OTHER_BASE)
        raise WeightsError(_OTHER_RESULT)
    return result


def _unpack(frame: memoryview, nbytes: int) -> bytes:
    """Decompress a frame; ValueError, ZstdError: it does not hold as many bytes."""
    if (size := zstandard.frame_content_size(frame)) != nbytes:
        raise ValueError(f"{size} bytes instead of {nbytes}")
    return zstandard.ZstdDecompressor().decompress(frame)


def _delta(array: np.ndarray, base: np.ndarray) -> tuple[bytes, bytes, bytes]:
    """Encode the body of a delta, in one pass over both arrays that also computes their checksums."""
    new, old = _integers(array), _integers(base)
    base_sum, result_sum = xxhash.xxh3_64(), xxhash.xxh3_64()
    gaps, distances = StreamWriter(_gap_dtype(array)), StreamWriter(new.dtype)
    ordered, last = is_float(array.dtype), -1
    for first in range(0, new.size, _AT_ONCE):
        some, before = new[first : first + _AT_ONCE], old[first : first + _AT_ONCE]
        result_sum.update(some)
        base_sum.update(before)
        where = np.flatnonzero(some != before)
        if not len(where):
            continue
        distances.put(_distance(before[where], some[where], ordered))
        gaps.put(np.diff(where, prepend=last - first) - 1)
        last = first + int(where[-1])
    gap_frame = gaps.frame()
    head = _HEAD.pack(base_sum.intdigest(), result_sum.intdigest(), gaps.count, len(gap_frame))
    return head, gap_frame, distances.frame()


def _apply(result: np.ndarray, gaps: StreamReader, distances: StreamReader) -> None:
    """Turn the base, held in `result`, into the array that was encoded."""
    flat, ordered, last = _integers(result), is_float(result.dtype), -1
    for gap, distance in zip(gaps.some(np.int64, _AT_ONCE), distances.some(flat.dtype, _AT_ONCE), strict=True):
        gap += 1
        where = np.cumsum(gap, out=gap)
        where += last
        last = int(where[-1])
        flat[where] = _apply_steps(flat[where], distance, ordered)


def _distance(old: np.ndarray, new: np.ndarray, ordered: bool) -> np.ndarray:
    """Return the steps from old to new, never 0, zig-zag encoded as unsigned integers of their width.

    The steps -1, 1, -2, 2 ... become 0, 1, 2, 3 ...
    """
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


def _copy(source: np.ndarray, target: np.ndarray) -> int:
    """Copy bytes and return their checksum, reading memory once."""
    digest = xxhash.xxh3_64()
    for first in range(0, len(source), _AT_ONCE):
        some = source[first : first + _AT_ONCE]
        target[first : first + _AT_ONCE] = some
        digest.update(some)
    return digest.intdigest()


def _blob(kind: int, *parts: np.ndarray) -> memoryview:
    return add_checksum(np.concatenate([np.zeros(CHECKSUM_NBYTES, np.uint8), np.array([kind], np.uint8), *parts]))
