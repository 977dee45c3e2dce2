"""Keys and values of a block within the kernel: made of what is in rank space, normed, rotated.

Shape letters: as in attention.py; o columns of a matrix, those of all heads.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.low_rank.factors import KeySteps, KeyValueFactors, in_halves
from axlearn_like.kernels.paged_attention.rows import widen

_COLUMNS = 512  # columns of keys or values made at once


class KeyMatrices(NamedTuple):
    """Arrays that stay in fast memory; the columns of all are heads, side by side."""

    k_lo: Any
    v_lo: Any
    k_bias: Any  # [1, o]
    k_norm: Any  # [1, w]

    @classmethod
    def of(cls, factors: KeyValueFactors, rank: int, dtype: Any) -> "KeyMatrices":
        """Return them of a layer; matrices with rows of zeros up to `rank`, and of a type."""

        def matrix(x_lkw: jax.Array) -> jax.Array:
            return jnp.pad(x_lkw.reshape(len(x_lkw), -1).astype(dtype), [(0, rank - len(x_lkw)), (0, 0)])

        def vector(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else in_halves(x).astype(jnp.float32).reshape(1, -1)

        matrices = matrix(in_halves(factors.k_lkh)), matrix(widen(factors.v_lkh))
        return cls(*matrices, vector(factors.k_bias_kh), vector(factors.k_norm_h))


def make_heads(low_sl: jax.Array, matrix_lo: Any, width: int) -> Iterator[tuple[int, jax.Array]]:
    """Yield each head's keys or values, float32 [s, w]; some heads are made by one product."""
    for begin in range(0, matrix_lo.shape[1], _COLUMNS):
        columns = slice(begin, min(begin + _COLUMNS, matrix_lo.shape[1]))
        made = jnp.dot(low_sl, matrix_lo[:, columns], preferred_element_type=jnp.float32)
        for place in range(made.shape[1] // width):
            yield begin // width + place, made[:, place * width : (place + 1) * width]


def finish_keys(
    k_sw: jax.Array, head: int, whole: KeyMatrices, angles: tuple[jax.Array, jax.Array] | None, steps: KeySteps
) -> jax.Array:
    """Return keys with their bias, normed and rotated; lanes that pad a head are zero throughout."""
    width = k_sw.shape[1]
    if whole.k_bias is not None:
        k_sw = k_sw + whole.k_bias[:, head * width : (head + 1) * width]
    if whole.k_norm is not None and steps.eps is not None:
        square = jnp.sum(k_sw * k_sw, axis=1, keepdims=True) / steps.head_dim
        k_sw = k_sw * jax.lax.rsqrt(square + steps.eps) * whole.k_norm[...]
    if angles is None:
        return k_sw
    cos, sin = angles
    return k_sw * cos + pltpu.roll(k_sw, width // 2, 1) * sin


def block_angles(tables: Any, block: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Return cosines, and sines that are negative in the first half, of a block's keys [s, w]; None: no rotation."""
    if not tables:
        return None
    places, first = tables[0][...], tables[1][pl.ds(block, 1)]
    half = places.shape[1] // 2
    turned = lambda x: pltpu.roll(x, half, 1)  # noqa: E731
    products, crossed = places * first, turned(places) * first  # cos cos | sin sin, and sin cos | cos sin
    cos, sin = products - turned(products), crossed + turned(crossed)
    left = jax.lax.broadcasted_iota(jnp.int32, cos.shape, 1) < half
    return jnp.where(left, cos, -cos), jnp.where(left, -sin, sin)
