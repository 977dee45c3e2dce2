"""Queries of an item of the kernel: how they stand in memory, and which keys they see.

Shape letters: as in attention.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.paged_attention.softmax_blocks import in_eights


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
