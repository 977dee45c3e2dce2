"""Attention over as many blocks of keys as some rows need, which is known only when the program runs; for CPUs.

A program for each number of blocks would hold n (n + 1) / 2 products with the keys of n blocks, in each layer and for
each group of rows, all of which XLA compiles. Here each block stands once, in a condition within that of the block
before it: scores on the way in; exponentials and sums on the way out, when the largest score of all is known. Blocks
that are not needed are not read. Sums of the others are taken as by `attend_blocks`, to the bit.

Shape letters: as in blocks.py.
"""

import functools
import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.deterministic import KEYS_AT_ONCE, key_sums, key_weights, no_fuse
from axlearn_like.layers.contexts.blocks import (
    block_scores,
    flat_queries,
    key_blocks,
    mask_scores,
    require_causal,
    split_queries,
    total_with_sinks,
    weighted_sum,
)
from mesh.programs.traced import unknown
from mesh.rules import constrain

_SHARDING = "batch", "heads", None, None


class _Behind(NamedTuple):
    """Contributions of the blocks from one on; zeros where they are not needed."""

    peak: jax.Array  # the largest score of all blocks, those before included, [r, k, n, 1]
    mixed: list[jax.Array]  # weighted sum of each block's values, [r, k, n, h]
    sums: list[jax.Array]  # sums of weights, 256 keys each, [r, k, n, 1]
    begun: list[jax.Array]  # weights of the first blocks, of 256 keys that begin before them, [r, k, n, s]


def attend_needed(
    q_rckqh: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    needed: jax.Array,
    positions: jax.Array,
    attention: AttentionParams,
) -> jax.Array:
    """Return `attend_blocks` over the first `needed` blocks of keys, int32 from 1 on; [r, c, k, q, h]."""
    require_causal(attention.rules)
    rules, length, per_head, width = attention.rules, q_rckqh.shape[1], q_rckqh.shape[3], q_rckqh.shape[4]
    q, blocks = flat_queries(q_rckqh, rules), key_blocks(sum(v.shape[2] for v in values), width)

    def behind(index: int, peak: jax.Array | None) -> _Behind:
        """Return what the block `index` contributes, and those behind it that are needed."""
        scores = block_scores(q, constrain(keys[index], *_SHARDING, *[None] * (keys[index].ndim - 4)))
        scores = no_fuse(mask_scores(scores, unknown(blocks[index].start), positions, per_head, rules))
        largest = jnp.max(scores, axis=-1, keepdims=True)
        peak = no_fuse(largest if peak is None else jnp.maximum(peak, largest))
        after = index + 1
        if after == len(blocks):
            rest = nothing(after, peak)
        else:
            rest = jax.lax.cond(needed > after, partial(behind, after), partial(nothing, after), peak)
        weights, v = key_weights(scores, rest.peak), constrain(values[index], *_SHARDING)
        mixed, sums, begun = weighted_sum(weights.astype(v.dtype), v), rest.sums, [weights, *rest.begun]
        if _begins_sum(blocks[index]):
            sums, begun = [*key_sums(*begun), *sums], []
        return _Behind(rest.peak, [mixed, *rest.mixed], sums, begun)

    def nothing(first: int, peak: jax.Array) -> _Behind:
        """Return what the blocks from `first` on contribute where they are not needed."""
        rest = blocks[first:]
        begun = list(itertools.takewhile(lambda block: not _begins_sum(block), rest))
        sums = -(-sum(map(_size, rest[len(begun) :])) // KEYS_AT_ONCE)
        mixed = [zeros(values[0].shape[-1])] * len(rest)
        return _Behind(peak, mixed, [zeros(1)] * sums, [zeros(_size(block)) for block in begun])

    def zeros(size: int) -> jax.Array:
        return constrain(jnp.zeros((*q.shape[:3], size), jnp.float32), *_SHARDING)

    found = behind(0, None)
    mixed, total = (functools.reduce(jnp.add, parts) for parts in (found.mixed, found.sums))
    total = total_with_sinks(total, found.peak, attention.sinks, length)
    return split_queries(mixed / total, q_rckqh, values[0].shape[-1])


def _begins_sum(block: slice) -> bool:
    """Return True if a sum of weights begins with this block."""
    return block.start % KEYS_AT_ONCE == 0


def _size(block: slice) -> int:
    return block.stop - block.start
