"""Entropy-coded uniform quantiser: all entries with one step, coded with the bits that their frequencies call for.

At equal mean square error it takes within a quarter of a bit of what any code of independent entries needs (Gish and
Pierce 1968): the yardstick for codecs that predict entries from their neighbours.

    rest = head, group of each row (uint8), four integers of each group, one or two Zstandard frames of each group
"""

import dataclasses
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, override

import numpy as np
import zstandard

from rl.parameter_server.codecs.layout import contiguous, flat_bytes
from rl.parameter_server.codecs.rows import BodyReader, RowCodec

_HEAD = struct.Struct("<ddB")  # step, shift, groups
_WIDEST = 4096  # integers that entries are rounded to, at most
_GROUPS = 32  # groups of rows at most
_AT_ONCE = 1 << 16  # bytes looked up at a time: temporaries stay in cache
# Zstandard as a Huffman coder: matches of short strings, which occur by chance, cost more than they save.
_HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, window_log=17, hash_log=6, chain_log=6, search_log=1, target_length=0
)


@dataclasses.dataclass(frozen=True)
class EcsqCodec(RowCodec):
    """Codec that rounds floats to multiples of one step from their row's mean, and codes the multiples by Huffman.

    Values that round to a multiple come back as the mean of those that do, nearer to zero by one shift for all. Rows of
    similar spread share their frequencies. The step is chosen for the error.
    """

    name = "ecsq"

    @override
    def encode_rows(self, values: np.ndarray, error: float) -> list[np.ndarray]:
        step = step_for(values, error)
        shift = shift_of(values.reshape(-1), step)
        codes = np.rint(values / step).astype(np.int16)
        groups, count = _groups(codes)
        coded = [_encode(codes[groups == number].reshape(-1)) for number in range(count)]
        heads = np.array([head for head, _ in coded], np.int32)
        frames = b"".join(frame for _, frame in coded)
        parts = [
            np.frombuffer(_HEAD.pack(step, shift, count), np.uint8),
            groups,
            heads,
            np.frombuffer(frames, np.uint8),
        ]
        return [flat_bytes(contiguous(part)) for part in parts]

    @override
    def decode_rows(self, reader: BodyReader, rows: int, columns: int) -> np.ndarray:
        step, shift, count = reader.unpack(_HEAD)
        groups = reader.take(np.uint8, rows)
        heads = reader.take(np.int32, 4 * int(count)).reshape(-1, 4)
        found = np.empty((rows, columns), np.float32)
        for number, (least, base, low, high) in enumerate(heads.tolist()):
            own = groups == number
            size = int(np.count_nonzero(own)) * columns
            frames = reader.take(np.uint8, low), reader.take(np.uint8, high)
            integers = _Integers(least, base, step, shift)
            found[own] = integers.decoded(frames, size).reshape(-1, columns)
        if reader.left or (len(groups) and groups.max() >= count):
            raise ValueError(f"{reader.left} bytes too many, or a row of no group")
        return found


def step_for(values: np.ndarray, error: float) -> float:
    """Return the step whose rounding has this mean square error, within 0.1 %, and at most 4,096 integers."""
    largest = float(np.abs(values).max())
    least = max(2 * largest / (_WIDEST - 4), float(np.finfo(np.float32).tiny))
    sample = values.reshape(-1)[:: max(1, values.size >> 18)]

    def found(step: float) -> float:
        return float(np.mean((restored(np.rint(sample / step), step, shift_of(sample, step)) - sample) ** 2))

    low, high = least, max(2 * largest, least)  # twice the largest rounds all to 0
    while high > low * 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if found(middle) <= error else (low, middle)
    return low


def shift_of(values: np.ndarray, step: float) -> float:
    """Return how much nearer to zero the values are than the multiples that they round to, on average, in steps."""
    codes = np.abs(np.rint(values / step))
    some = codes > 0
    return float(np.mean(codes[some] - np.abs(values[some]) / step)) if some.any() else 0.0


def restored(codes: np.ndarray, step: float, shift: float) -> np.ndarray:
    """Return the values of multiples, float64."""
    return (codes - np.sign(codes) * shift) * step


def _groups(codes: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the group of each row, uint8 [rows], and their number, of those tried the one with the fewest bits.

    Rows of similar spread are together. A group costs its head and tables, about a byte for each integer that occurs.
    """
    some = codes[:, :: max(1, codes.size >> 18)]
    ranks = np.empty(len(codes), np.int64)
    ranks[np.argsort(some.std(axis=1), kind="stable")] = np.arange(len(codes))
    symbols, alphabet = (some - some.min()).astype(np.int64), int(some.max()) - int(some.min()) + 1
    best, bits, count = ranks * 0, np.inf, 1
    for tried in (1, 2, 4, 8, 16, _GROUPS):
        groups = ranks * min(tried, len(codes)) // len(codes)
        table = np.bincount((groups[:, None] * alphabet + symbols).reshape(-1), minlength=tried * alphabet)
        table = table.reshape(tried, alphabet).astype(np.float64)
        shares = np.where(table > 0, table / np.maximum(table.sum(axis=1, keepdims=True), 1), 1.0)
        entropy = -(table * np.log2(shares)).sum() * (codes.size / some.size)
        cost = float(8 * (table > 0).sum() + 8 * 28 * tried + entropy)
        if cost < bits:
            best, bits, count = groups, cost, int(groups.max()) + 1
    return best.astype(np.uint8), count


def _encode(codes: np.ndarray) -> tuple[tuple[int, int, int, int], bytes]:
    """Return (least, base, bytes of the first frame, of the second), and the frames, of int16 [n] integers.

    The first has the low bytes of the integers less the least, as many to a byte as digits of the base fit, so that a
    Huffman code may give less than a bit to each. The second has the high bytes, if there are any.
    """
    least, most = int(codes.min()), int(codes.max())
    least, base = (least, most - least + 1) if most - least < 256 else (-128, 256)
    above = codes - np.int16(least)
    low, digits = (above & 255).astype(np.uint8), _digits(base)
    padded = np.pad(low, (0, -len(low) % digits)).reshape(-1, digits)
    packed = sum((padded[:, at] * np.uint8(base**at) for at in range(1, digits)), padded[:, 0])
    coder = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
    first = coder.compress(contiguous(packed).data)
    high = (above >> 8).astype(np.int8)
    second = coder.compress(high.data) if high.any() else b""
    return (least, base, len(first), len(second)), first + second


class _Integers(NamedTuple):
    """How the integers of a group, less the least, become values."""

    least: int
    base: int
    step: float
    shift: float

    def decoded(self, frames: Sequence[np.ndarray], size: int) -> np.ndarray:
        """Return the values of the frames that `_encode` made, float32 [size]."""
        digits = _digits(self.base)
        low = _decompressed(frames[0], -(-size // digits))
        if len(frames[1]):
            high = _decompressed(frames[1], size).view(np.int8).astype(np.int64)
            return self._values(256 * high + low)
        table = self._values(np.arange(256)[:, None] // self.base ** np.arange(digits) % self.base)
        found = np.empty((len(low), digits), np.float32)
        for start in range(0, len(low), _AT_ONCE):
            found[start : start + _AT_ONCE] = table[low[start : start + _AT_ONCE]]
        return found.reshape(-1)[:size]

    def _values(self, codes: np.ndarray) -> np.ndarray:
        return restored(codes + self.least, self.step, self.shift).astype(np.float32)


def _digits(base: int) -> int:
    """Return how many digits of a base of 1 to 256 fit in a byte; 8 of base 1."""
    if not 1 <= base <= 256:
        raise ValueError(f"base {base} of an entropy coder; expected 1 to 256")
    return 8 if base == 1 else int(8 / math.log2(base))


def _decompressed(frame: np.ndarray, size: int) -> np.ndarray:
    """Return the bytes of a frame (ValueError: it has not so many)."""
    if (found := zstandard.frame_content_size(frame.data)) != size:
        raise ValueError(f"{found} bytes of integers, expected {size}")
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.data), np.uint8)
