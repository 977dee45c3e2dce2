"""Keys and values rounded to int8: numbers, and a float32 scale for each token and head.

The largest magnitude of a token's keys of one head, or of its values, becomes 127, so no entry moves by more than 1/254
of it. Why a scale for each token: see layers/contexts/int8_cache.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axlearn_like.kernels.deterministic import no_fuse

LARGEST = 127


class Rounded(NamedTuple):
    """Keys or values of tokens, rounded."""

    numbers: Any  # int8 [..., h], -127 to 127
    scales: Any  # float32 [..., 1]


def round_heads(x: jax.Array) -> Rounded:
    """Return the nearest int8 numbers of [..., h], with one scale for each token and head; NaN stays NaN."""
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) * (1 / LARGEST)
    numbers = jnp.clip(jnp.round(x / jnp.where(scales > 0, scales, 1)), -LARGEST, LARGEST)
    return Rounded(*no_fuse((numbers.astype(jnp.int8), scales)))  # made once: what is read now is what is written


def restore(numbers: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the numbers times their scales."""
    return (numbers.astype(jnp.float32) * scales).astype(dtype)
