"""Floats as 8-bit integers with a scale per block: approximate, about half the bytes of bfloat16."""

import math
from typing import override

import numpy as np

from rl.parameter_server.codecs.frame import FloatCodec
from rl.parameter_server.codecs.layout import CHECKSUM_NBYTES, check_size
from rl.parameter_server.codecs.rows import not_finite
from rl.parameter_server.errors import WeightsError

BLOCK = 128  # entries that share a scale: 8.25 bits per entry
SMALLEST_SCALE = float(np.finfo(np.float32).smallest_normal)  # smaller float32 scales lose digits
_AT_ONCE = 1024 * BLOCK  # entries worked on at a time: temporaries stay in cache


class Int8Codec(FloatCodec):
    """Codec of blocks of 128 consecutive entries (C order; the last may be shorter): x is about scale * q, |q| <= 127.

    scale = max |x| / 127 of the block, float32, at least 2^-126. Before the result is rounded to its dtype,
    |decoded - x| <= scale / 2, up to the rounding of float32. Blocks start at the start of the array: a tensor that is
    sharded differently has other blocks, and other approximations.

    Layout: checksum, scales float32 [blocks], q int8 [entries].
    """

    name = "int8"

    @override
    def encode_floats(self, array: np.ndarray) -> np.ndarray:
        flat, codes_start = array.reshape(-1), CHECKSUM_NBYTES + 4 * _blocks(array.size)
        blob = np.empty(codes_start + array.size, np.uint8)
        scales, codes = blob[CHECKSUM_NBYTES:codes_start].view(np.float32), blob[codes_start:].view(np.int8)
        for first in range(0, array.size, _AT_ONCE):
            some = flat[first : first + _AT_ONCE]
            with np.errstate(over="ignore"):  # entries beyond float32 become infinite, and are refused
                blocks = _in_blocks(some.astype(np.float32))
            largest = np.abs(blocks).max(axis=1)
            if not np.isfinite(largest).all():
                raise WeightsError(not_finite(self.name, array, first))
            scale = _scales(largest)
            scales[first // BLOCK :][: len(scale)] = scale
            blocks /= scale[:, None]
            codes[first : first + len(some)] = np.rint(blocks, out=blocks).reshape(-1)[: len(some)]
        return blob

    @override
    def decode_floats(self, body: memoryview, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        count = math.prod(shape)
        scale_bytes = 4 * _blocks(count)
        check_size(self.name, body, scale_bytes + count, shape, np.int8)
        scales, codes = np.frombuffer(body[:scale_bytes], np.float32), np.frombuffer(body[scale_bytes:], np.int8)
        flat = np.empty(count, dtype)
        for first in range(0, count, _AT_ONCE):
            some = codes[first : first + _AT_ONCE]
            blocks = _in_blocks(some.astype(np.float32))
            blocks *= scales[first // BLOCK :][: len(blocks), None]
            flat[first : first + len(some)] = blocks.reshape(-1)[: len(some)]
        return flat.reshape(shape)


def _blocks(count: int) -> int:
    return math.ceil(count / BLOCK)


def _in_blocks(flat: np.ndarray) -> np.ndarray:
    """Reshape to [blocks, BLOCK], padded with zeros."""
    lacking = -len(flat) % BLOCK
    return (np.pad(flat, (0, lacking)) if lacking else flat).reshape(-1, BLOCK)


def _scales(largest: np.ndarray) -> np.ndarray:
    """Return float32 [blocks]; rounded down where 127 times the scale would overflow float32."""
    scale = np.maximum(largest / np.float32(127), np.float32(SMALLEST_SCALE))
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(scale * np.float32(127)), scale, np.nextafter(scale, np.float32(0)))
