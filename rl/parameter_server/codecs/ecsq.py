"""Entropy-coded uniform quantiser: all entries with one step, coded with the bits that their frequencies call for.

At equal mean square error it takes within a quarter of a bit of what any code of independent entries needs (Gish and
Pierce 1968): the yardstick for codecs that predict entries from their neighbours.

    rest = head, group of each row (uint8), Zstandard frame of frequencies, states of the lanes, words
"""

import dataclasses
import struct
from typing import override

import numpy as np
import zstandard

from rl.parameter_server.codecs import rans
from rl.parameter_server.codecs.layout import contiguous, flat_bytes
from rl.parameter_server.codecs.rows import BodyReader, RowCodec

_HEAD = struct.Struct("<ddiII")  # step, shift, least integer, bytes of the frequencies, words
_WIDEST = 4096  # integers that entries are rounded to, at most
_GROUPS = 32  # groups of rows at most


@dataclasses.dataclass(frozen=True)
class EcsqCodec(RowCodec):
    """Codec that rounds floats to multiples of one step from their row's mean, and codes the multiples by rANS.

    Values that round to a multiple come back as the mean of those that do, nearer to zero by one shift for all. Rows of
    similar spread share their frequencies. The step is chosen for the error.
    """

    name = "ecsq"

    @override
    def encode_rows(self, values: np.ndarray, error: float) -> list[np.ndarray]:
        step = step_for(values, error)
        shift = shift_of(values.reshape(-1), step)
        codes = np.rint(values / step).astype(np.int64)
        least = int(codes.min())
        groups, group_count = _groups(codes)
        symbols, of_entries = (codes - least).reshape(-1), np.repeat(groups, values.shape[1])
        freqs = rans.frequencies(symbols, of_entries, group_count)
        states, words = rans.encode(symbols, of_entries, freqs)
        table = zstandard.ZstdCompressor(level=19).compress(freqs.T.tobytes())
        head = _HEAD.pack(step, shift, least, len(table), len(words))
        parts = [np.frombuffer(head, np.uint8), groups.astype(np.uint8), np.frombuffer(table, np.uint8), states, words]
        return [flat_bytes(contiguous(part)) for part in parts]

    @override
    def decode_rows(self, reader: BodyReader, rows: int, columns: int) -> np.ndarray:
        step, shift, least, table_bytes, word_count = reader.unpack(_HEAD)
        groups = reader.take(np.uint8, rows).astype(np.int64)
        table = zstandard.ZstdDecompressor().decompress(
            reader.take(np.uint8, int(table_bytes)).tobytes(), max_output_size=2 * _WIDEST * _GROUPS
        )
        freqs = np.frombuffer(table, np.uint16).reshape(-1, int(groups.max()) + 1).T
        states = reader.take(np.uint32, rans.lanes_of(rows * columns))
        words = reader.take(np.uint16, int(word_count))
        if reader.left:
            raise ValueError(f"{reader.left} bytes too many")
        symbols = rans.decode(states, words, np.repeat(groups, columns), freqs)
        return restored(symbols + int(least), step, shift).reshape(rows, columns)


def step_for(values: np.ndarray, error: float) -> float:
    """Return the step whose rounding has this mean square error, found by bisection, within 0.1 %.

    The step is so large at least that no more than 4,096 integers are in use.
    """
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
    """Return the group of each row, int64 [rows], and their number, of those tried the one with the fewest bits.

    Rows of similar spread are together. Frequencies of a group cost about a byte for each integer that occurs.
    """
    ranks = np.empty(len(codes), np.int64)
    ranks[np.argsort(codes.std(axis=1), kind="stable")] = np.arange(len(codes))
    symbols, alphabet = (codes - codes.min()).reshape(-1), int(codes.max() - codes.min()) + 1
    best, bits, count = ranks * 0, np.inf, 1
    for tried in (1, 2, 4, 8, 16, _GROUPS):
        groups = ranks * min(tried, len(codes)) // len(codes)
        counts = np.bincount(np.repeat(groups, codes.shape[1]) * alphabet + symbols, minlength=tried * alphabet)
        table = counts.reshape(tried, alphabet).astype(np.float64)
        shares = np.where(table > 0, table / np.maximum(table.sum(axis=1, keepdims=True), 1), 1.0)
        cost = float(8 * (table > 0).sum() - (table * np.log2(shares)).sum())
        if cost < bits:
            best, bits, count = groups, cost, int(groups.max()) + 1
    return best, count
