"""Keys and values of a block within the kernel, made of what is in rank space, normed, rotated; queries of an item.

Shape letters: as in attention.py; o columns of a matrix, those of all heads.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.low_rank.factors import KeySteps, KeyValueFactors, in_halves
from axlearn_like.kernels.paged_attention.rows import widen
from axlearn_like.kernels.paged_attention.softmax_blocks import in_eights

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


@dataclasses.dataclass(frozen=True)
class ItemQueries:
    """Queries of an item: of each key/value head those of its query heads, the tokens of one after the other.

    Many tokens stand as they are, all heads of one in a row, and are put in this order within the kernel.
    """

    tokens: int  # a power of two
    heads: int
    per_head: int
    width: int
    count: int  # queries of one key/value head, a multiple of 8

    @classmethod
    def of(cls, tokens: int, heads: int, per_head: int, width: int) -> "ItemQueries":
        """Return the queries of an item of so many tokens."""
        return cls(tokens, heads, per_head, width, -(-tokens * per_head // 8) * 8)

    @property
    def in_place(self) -> bool:
        """True if they are arranged within the kernel."""
        return self.tokens % 16 == 0  # rows of a register of bfloat16

    def arranged(self, q_itkqw: jax.Array) -> jax.Array:
        """Return queries as the kernel takes them, [i, t, k * q * w] or [i, k, n, w]."""
        if self.in_place:
            return q_itkqw.reshape(len(q_itkqw), self.tokens, -1)
        return in_eights(q_itkqw.transpose(0, 2, 3, 1, 4).reshape(len(q_itkqw), self.heads, -1, self.width))

    def as_tokens(self, mixed: jax.Array) -> jax.Array:
        """Return what is arranged so as [i, t, k, q, w]."""
        if self.in_place:
            return mixed.reshape(len(mixed), self.tokens, self.heads, self.per_head, self.width)
        shape = (len(mixed), self.heads, self.per_head, self.tokens, self.width)
        return mixed[:, :, : self.tokens * self.per_head].reshape(shape).transpose(0, 3, 1, 2, 4)

    def read(self, ref: Any, head: int) -> jax.Array:
        """Return the queries of one key/value head, [n, w]."""
        if self.in_place:
            return jnp.concatenate([ref[:, columns] for columns in self._columns(head)])
        return ref[head]

    def write(self, ref: Any, head: int, mixed_nw: jax.Array) -> None:
        """Store what they make."""
        mixed_nw = mixed_nw.astype(ref.dtype)
        if not self.in_place:
            ref[head] = mixed_nw
            return
        for place, columns in enumerate(self._columns(head)):
            ref[:, columns] = mixed_nw[place * self.tokens : (place + 1) * self.tokens]

    def _columns(self, head: int) -> list[slice]:
        first = head * self.per_head
        return [slice(one * self.width, (one + 1) * self.width) for one in range(first, first + self.per_head)]

    def visible(
        self, keys: int, position: jax.Array, first: jax.Array, end: jax.Array, window: int | None
    ) -> jax.Array:
        """Return which keys of a block they see, bool [n, s]; see `softmax_blocks.visible_keys`."""
        at = position + jax.lax.broadcasted_iota(jnp.int32, (self.count, keys), 1)
        own = first + (jax.lax.broadcasted_iota(jnp.int32, (self.count, keys), 0) & (self.tokens - 1))
        seen = (at <= own) & (at < end)
        return seen if window is None else seen & (at > own - window)
