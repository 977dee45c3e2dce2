"""Softmax over blocks of pages within a kernel: blocks are fetched one ahead of the computation, keys ascending.

The softmax is that of blockwise kernels, in float32: weighted values, the largest score and the sum of exponentials so
far, all of which shrink when a larger score is met.

Shape letters: n queries of an item and key/value head, s keys of a block, l lanes of a register; k, h as in rows.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.attention.interface import MASKED
from axlearn_like.kernels.paged_attention.rows import LANES


class BlockSoftmax(NamedTuple):
    """State of the softmax of one item, of all heads: references to vector memory, which `scratch` describes."""

    acc_knh: Any
    peak_knl: Any  # all lanes the same
    total_knl: Any

    @staticmethod
    def scratch(heads: int, queries: int, width: int) -> list[Any]:
        """Return the memory of a state."""
        return [pltpu.VMEM((heads, queries, lanes), jnp.float32) for lanes in (width, LANES, LANES)]

    def clear(self) -> None:
        """Begin with no key."""
        self.acc_knh[...], self.total_knl[...] = jnp.zeros_like(self.acc_knh), jnp.zeros_like(self.total_knl)
        self.peak_knl[...] = jnp.full_like(self.peak_knl, MASKED)

    def add(self, head: int, scores_ns: jax.Array, v_sh: jax.Array, v_scales: jax.Array | None = None) -> None:
        """Add a block of keys; `v_scales` [1, s]: factors of their values, those of the weights being float32."""
        before = self.peak_knl[head][:, :1]
        peak = jnp.maximum(before, jnp.max(scores_ns, axis=1, keepdims=True))
        weights, shrunk = jnp.exp(scores_ns - peak), jnp.exp(before - peak)
        total = shrunk * self.total_knl[head][:, :1] + jnp.sum(weights, axis=1, keepdims=True)
        weights = weights if v_scales is None else weights * v_scales
        mixed = jnp.dot(weights.astype(v_sh.dtype), v_sh, preferred_element_type=jnp.float32)
        self.acc_knh[head] = shrunk * self.acc_knh[head] + mixed
        self.peak_knl[head] = jnp.broadcast_to(peak, self.peak_knl.shape[1:])
        self.total_knl[head] = jnp.broadcast_to(total, self.total_knl.shape[1:])

    def mixed(self) -> jax.Array:
        """Return the weighted mean of the values, [k, n, h]; zeros without a key."""
        total = self.total_knl[...][..., :1]
        return self.acc_knh[...] / jnp.where(total > 0, total, 1.0)

    def log_sums(self) -> jax.Array:
        """Return the logarithm of the sum of exponentials, [k, n, l], all lanes the same; MASKED without a key."""
        total = self.total_knl[...]
        some = total > 0
        return jnp.where(some, self.peak_knl[...] + jnp.log(jnp.where(some, total, 1.0)), MASKED)


def scores(
    q_nh: jax.Array, k_sh: jax.Array, factor: jax.Array | float, soft_cap: float | None, visible: jax.Array
) -> jax.Array:
    """Return the scores of queries and keys times a factor, capped, MASKED where a key is not visible; [n, s]."""
    products = jax.lax.dot_general(q_nh, k_sh, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    found = factor * products
    found = found if soft_cap is None else soft_cap * jnp.tanh(found / soft_cap)
    return jnp.where(visible, found, MASKED)


def visible_keys(
    shape: tuple[int, int], position: jax.Array, queries: jax.Array, end: jax.Array, per_head: int, window: int | None
) -> jax.Array:
    """Return which keys of a block causal queries see, bool [n, s].

    Args:
        shape: queries and keys.
        position: position of the block's first key.
        queries: position of the item's first token.
        end: behind the last key.
        per_head: queries of each token.
        window: keys that a query sees, its own included; None: all.
    """
    keys = position + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    positions = queries + jax.lax.broadcasted_iota(jnp.int32, shape, 0) // per_head
    visible = (keys <= positions) & (keys < end)
    return visible if window is None else visible & (keys > positions - window)


def block_buffer(pool: jax.Array, tokens: int) -> tuple[int, ...]:
    """Return the shape of two slots for blocks of so many tokens of a pool [pages, tokens, lines, width].

    Lines wider than a register are cut into parts of its width, [2, parts, tokens, lines, 128]: a strided read takes no
    wider ones.
    """
    lines, width = pool.shape[2:]
    return (2, tokens, lines, width) if width <= LANES else (2, width // LANES, tokens, lines, LANES)


def page_copies(pool: Any, buffer: Any, arrived: Any) -> Callable[[jax.Array, jax.Array, int], Sequence[Any]]:
    """Return the `copies` of `for_each_block` for one pool and a buffer of the shape `block_buffer`."""
    size = pool.shape[1]

    def copies(page: jax.Array, slot: jax.Array, place: int) -> list[Any]:
        tokens = pl.ds(place * size, size)
        if buffer.ndim == 4:
            return [pltpu.make_async_copy(pool.at[page], buffer.at[slot, tokens], arrived.at[slot])]
        sources = [pool.at[page, :, :, pl.ds(part * LANES, LANES)] for part in range(buffer.shape[1])]
        return [
            pltpu.make_async_copy(source, buffer.at[slot, part, tokens], arrived.at[slot])
            for part, source in enumerate(sources)
        ]

    return copies


def keys_and_values(buffer: Any, slot: jax.Array, head: int) -> tuple[jax.Array, jax.Array]:
    """Return one head's keys and values of a block, [keys, h]: line 2 * head of each token, and the next one."""
    if buffer.ndim == 4:
        return _lines(buffer.at[slot], head)
    k, v = zip(*(_lines(buffer.at[slot, part], head) for part in range(buffer.shape[1])), strict=True)
    return jnp.concatenate(k, axis=1), jnp.concatenate(v, axis=1)


def _lines(block: Any, head: int) -> tuple[jax.Array, jax.Array]:
    keys, lines, width = block.shape
    if block.dtype == jnp.float32:
        flat = block.reshape(keys * lines, width)
        return flat[pl.ds(2 * head, keys, stride=lines)], flat[pl.ds(2 * head + 1, keys, stride=lines)]
    # Two lines of bfloat16 share a register's row, keys in the lower halves: both come with one strided read.
    words = block.bitcast(jnp.uint32).reshape(keys * lines // 2, width)
    both = words[pl.ds(head, keys, stride=lines // 2)]
    k, v = both << 16, both & jnp.uint32(0xFFFF0000)
    return tuple(pltpu.bitcast(half, jnp.float32).astype(jnp.bfloat16) for half in (k, v))  # pyright: ignore


def for_each_block(
    pages_w: Callable[[jax.Array], jax.Array],
    keys: tuple[Any, Any],
    *,
    page_size: int,
    block: int,
    copies: Callable[[jax.Array, jax.Array, int], Sequence[Any]],
    attend: Callable[[jax.Array, jax.Array], None],
) -> None:
    """Attend to the pages of some keys, a block of pages after the other, the next one under way.

    Args:
        pages_w: the page at an index of the item's table.
        keys: positions of the first one and behind the last one; the first page is attended to from its beginning.
        block: pages of a block.
        copies: the copies of a page into a slot (0 or 1) of the buffers, at a place of the block.
        attend: called with the slot of a block that has arrived, and the position of its first key.
    """
    begin, end = keys
    first_page, last_page = begin // page_size, jnp.maximum((end - 1) // page_size, 0)
    blocks = jnp.where(end > begin, (last_page - first_page) // block + 1, 0)

    def for_each_copy(index: jax.Array, act: Callable[[Any], None]) -> None:
        for place in range(block):
            # Behind the last page it is fetched again: a block has one size, and what is behind the end is masked.
            page = pages_w(jnp.minimum(first_page + index * block + place, last_page))
            for copy in copies(page, index % 2, place):
                act(copy)

    @pl.when(blocks > 0)
    def _() -> None:
        for_each_copy(jnp.int32(0), lambda each: each.start())

    @pl.loop(0, blocks)
    def _block(index: jax.Array) -> None:
        @pl.when(index + 1 < blocks)
        def _() -> None:
            for_each_copy(index + 1, lambda each: each.start())

        for_each_copy(index, lambda each: each.wait())
        attend(index % 2, (first_page + index * block) * page_size)


def in_eights(q_iknh: jax.Array) -> jax.Array:
    """Return queries whose number is a multiple of 8, the rows of a register."""
    return jnp.pad(q_iknh, [(0, 0), (0, 0), (0, -q_iknh.shape[2] % 8), (0, 0)])
