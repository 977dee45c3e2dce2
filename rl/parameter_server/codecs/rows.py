"""Arrays of floats as rows: a channel of keys, a token's values, or an output of a weight matrix each."""

import abc
import dataclasses
import struct
from collections.abc import Sequence
from typing import override

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from rl.parameter_server.codecs.frame import FloatCodec
from rl.parameter_server.codecs.layout import flat_bytes, joined
from rl.parameter_server.errors import WeightsError

_OWN_MEAN = 64  # columns from which a row has a mean of its own: 16 bits for a row
_HEAD = struct.Struct("<QdB")  # entries, mean, True with means of rows


class BodyReader:
    """The parts of a body, one after the other."""

    def __init__(self, body: memoryview):
        self._body, self._at = body, 0

    @property
    def left(self) -> int:
        """Bytes that were not read."""
        return len(self._body) - self._at

    def unpack(self, form: struct.Struct) -> tuple[int | float, ...]:
        """Return the next numbers (struct.error: there are fewer)."""
        self._at += form.size
        return form.unpack_from(self._body, self._at - form.size)

    def take(self, dtype: DTypeLike, count: int) -> np.ndarray:
        """Return the next entries (ValueError: there are fewer)."""
        found = np.frombuffer(self._body, np.uint8, count * np.dtype(dtype).itemsize, self._at).view(dtype)
        self._at += found.nbytes
        return found


@dataclasses.dataclass(frozen=True)
class RowCodec(FloatCodec):
    """Codec of rows that are centred first: blob = checksum, entries, mean, means of rows (float16), the rest."""

    error: float = 1e-3  # mean square error over the variance of the array that the codec keeps to

    @abc.abstractmethod
    def encode_rows(self, values: np.ndarray, error: float) -> list[np.ndarray]:
        """Return what follows the means, uint8 each: centred values, float64 [rows, columns], with such an error."""

    @abc.abstractmethod
    def decode_rows(self, reader: BodyReader, rows: int, columns: int) -> np.ndarray:
        """Return the values, float32 or float64 [rows, columns] (ValueError: they are those of another array)."""

    @override
    def encode_floats(self, array: np.ndarray) -> np.ndarray:
        rows = _as_rows(self.name, array)
        values, mean, means = _centred(rows)
        head = np.frombuffer(_HEAD.pack(rows.size, mean, len(means) > 0), np.uint8)
        return joined(head, flat_bytes(means), *self.encode_rows(values, self.error * float(np.var(rows))))

    @override
    def decode_floats(self, body: memoryview, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size, columns, reader = int(np.prod(shape, dtype=np.int64)), _columns_of(shape), BodyReader(body)
        entries, mean, has_means = reader.unpack(_HEAD)
        if entries != size:
            raise ValueError(f"{entries} entries, expected {size}")
        means = reader.take(np.float16, size // columns if has_means else 0)
        most = min(float(jnp.finfo(dtype).max), float(np.finfo(np.float32).max))
        with np.errstate(over="ignore"):
            values = self.decode_rows(reader, size // columns, columns).astype(np.float32, copy=False)
            values += np.asarray(_added(mean, means), np.float32)
        np.clip(values, -most, most, out=values)  # rounding to the dtype makes no entry infinite
        return values.astype(dtype, copy=False).reshape(shape)


def _as_rows(codec: str, array: np.ndarray) -> np.ndarray:
    """Return an array as float64 [rows, columns], rounded to float32: columns are its last axis."""
    with np.errstate(over="ignore"):  # entries beyond float32 become infinite, and are refused
        flat = array.astype(np.float32).reshape(-1)
    if not np.isfinite(flat).all():
        raise WeightsError(not_finite(codec, array, 0))
    return flat.reshape(-1, _columns_of(array.shape)).astype(np.float64)


def _centred(rows: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """Return rows less their means, the mean of all entries, and those of the rows, which are taken if there are any.

    Args:
        rows: float64 [rows, columns], not empty.

    Returns:
        float64 [rows, columns]; the mean; float16 [rows], or [0] where rows are short or their means large.
    """
    with np.errstate(over="ignore"):
        means = rows.mean(axis=1).astype(np.float16)
    own = rows.shape[1] >= _OWN_MEAN and bool(np.isfinite(means).all())
    mean, means = float(rows.mean()), means if own else means[:0]
    return rows - _added(mean, means), mean, means


def _added(mean: float, means: np.ndarray) -> np.ndarray | float:
    return means.astype(np.float64)[:, None] if len(means) else mean


def _columns_of(shape: Sequence[int]) -> int:
    return max(1, shape[-1]) if shape else 1


def not_finite(codec: str, array: np.ndarray, start: int) -> str:
    """Return the message that names the first entry, from this one on, that is not finite in float32."""
    limit = float(np.finfo(np.float32).max)
    flat = array.reshape(-1)
    bad = start + int(np.argmax(~(np.abs(flat[start:].astype(np.float64)) <= limit)))
    where = ", ".join(str(int(i)) for i in np.unravel_index(bad, array.shape))
    return f"{codec} weights must be finite in float32; entry [{where}] of {array.dtype.name} is {float(flat[bad])}"
