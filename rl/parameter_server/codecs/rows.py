"""Arrays of floats as rows: a channel of keys, a token's values, or an output of a weight matrix each."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from rl.parameter_server.errors import WeightsError

_OWN_MEAN = 64  # columns from which a row has a mean of its own: 16 bits for a row


def as_rows(codec: str, array: np.ndarray) -> np.ndarray:
    """Return an array as float64 [rows, columns], rounded to float32: columns are its last axis.

    Raises:
        WeightsError: an entry is infinite, NaN, or beyond float32; names the first.
    """
    with np.errstate(over="ignore"):  # entries beyond float32 become infinite, and are refused
        flat = array.astype(np.float32).reshape(-1)
    if not np.isfinite(flat).all():
        raise WeightsError(not_finite(codec, array, 0))
    return flat.reshape(-1, columns_of(array.shape)).astype(np.float64)


def centred(rows: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
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


def with_means(values: np.ndarray, mean: float, means: np.ndarray) -> np.ndarray:
    """Return [rows, columns] with the means that `centred` took."""
    return values + _added(mean, means)


def _added(mean: float, means: np.ndarray) -> np.ndarray | float:
    return means.astype(np.float64)[:, None] if len(means) else mean


def columns_of(shape: Sequence[int]) -> int:
    """Return the columns of an array of this shape, at least one."""
    return max(1, shape[-1]) if shape else 1


def not_finite(codec: str, array: np.ndarray, start: int) -> str:
    """Return the message that names the first entry, from this one on, that is not finite in float32."""
    limit = float(np.finfo(np.float32).max)
    flat = array.reshape(-1)
    bad = start + int(np.argmax(~(np.abs(flat[start:].astype(np.float64)) <= limit)))
    where = ", ".join(str(int(i)) for i in np.unravel_index(bad, array.shape))
    return f"{codec} weights must be finite in float32; entry [{where}] of {array.dtype.name} is {float(flat[bad])}"


def from_rows(values: np.ndarray, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return decoded values as an array; rounding to the dtype makes no entry infinite."""
    most = float(jnp.finfo(dtype).max)
    return np.clip(values, -most, most).astype(np.float32).astype(dtype).reshape(tuple(shape))
