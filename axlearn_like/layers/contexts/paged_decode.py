"""Decoding by XLA on the pages themselves, where there is no kernel of paged attention and memory is dear: on GPUs.

Windows (window.py) are a second cache. Here each step gathers keys and values from their pages and drops them again.
The keys of every row are cut into *splits* of some hundred; splits of all rows stand one after the other in a list, and
a loop takes as many at a time as `at_once` bytes hold. So what is read follows the tokens that each row has, not the
longest row, and what is held beside the cache is one round of that loop and the splits' results: the maximum of the
scores, the sum of their exponentials and the mixed values, which are put together at the end (the split keys of
FlashDecoding). Keys that rows have in common are splits of their own, with the queries of all these rows.

Sums are taken in another order than by `attend_blocks`: results are those of scoring up to rounding.

Shape letters: r rows, c tokens of each, n = c * q queries of a key/value head, t owners of splits: a row, or a tile of
rows with m = n * (its rows) queries; l splits; g of them at once; s keys of one; k, q, h as in
attention/grouped_query.py.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, override

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.attention.interface import MASKED, ScoreRules
from axlearn_like.layers.contexts.blocks import (
    KEY_BLOCK,
    block_scores,
    flat_queries,
    mask_scores,
    require_causal,
    split_queries,
    total_with_sinks,
    weighted_sum,
)
from axlearn_like.layers.contexts.paged import NULL_PAGE, PagedContext, ReadPages
from mesh.rules import axis_sizes, constrain, partition

SPLIT = 256  # keys of a split, a multiple of those of any page
_AT_ONCE = 128 << 20  # bytes of keys and values that one round of the loop reads


class Partial(NamedTuple):
    """Results of some splits of keys for each query, float32."""

    peak: jax.Array  # [l, k, m, 1], the largest score
    total: jax.Array  # [l, k, m, 1], sum of exp(score - peak)
    mixed: jax.Array  # [l, k, m, h], values weighted with them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spans:
    """The keys that each owner reads from its pages, and its queries."""

    q_tkmh: jax.Array  # queries, scaled
    last_tm: jax.Array  # int32, the last key that each query sees
    table: jax.Array  # int32 [t, w], pages
    begins: jax.Array  # int32 [t], multiples of the page size
    ends: jax.Array  # int32 [t], keys behind the last one; at most `begins` where nothing is read
    most: int = dataclasses.field(metadata={"static": True})  # the most keys that an owner may read

    @property
    def splits(self) -> int:
        """The most splits of an owner."""
        return -(-self.most // SPLIT)

    @property
    def counts(self) -> jax.Array:
        """Number of splits of each owner, int32 [t]."""
        return (jnp.maximum(self.ends - self.begins, 0) + SPLIT - 1) // SPLIT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedDecodeContext(PagedContext):
    """One decoding step of every row, of a token or some drafted ones, on the pages (`kernel` is None)."""

    decodes: ClassVar[bool] = True

    shared: Any = None  # int32 [tiles], keys that the rows of a tile have in common, whole pages of them; None: none
    sources: Any = None  # int32 [tiles], the row whose pages hold them
    tile: int = dataclasses.field(default=1, metadata={"static": True})  # rows of a tile
    # Bytes of keys and values that are read at a time, at least one split
    at_once: int = dataclasses.field(default=_AT_ONCE, metadata={"static": True})

    @override
    def _by_xla(
        self, q_rckqh: jax.Array, table: jax.Array, page_size: int, read: ReadPages, attention: AttentionParams
    ) -> jax.Array:
        require_causal(attention.rules)
        rows, length, heads, _, width = q_rckqh.shape
        own = heads // math.prod(axis_sizes("heads").values()) or 1
        at_once = self.at_once // (SPLIT * 2 * own * width * q_rckqh.dtype.itemsize)
        found = [
            [_in_rows(x, rows, self.tile) for x in _attend_spans(one, page_size, read, at_once, attention.rules)]
            for one in self._spans(q_rckqh, table, page_size, attention.rules)
        ]
        # [r, splits of both kinds, k, n, ...]: what all rows of a tile see, then what is a row's own.
        peaks, totals, mixed = (jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
        peak = jnp.max(peaks, axis=1)
        scale = jnp.exp(peaks - peak[:, None])
        total = total_with_sinks(jnp.sum(scale * totals, axis=1), peak, attention.sinks, length)
        mixed = jnp.sum(scale * mixed, axis=1) / jnp.where(total > 0, total, 1)  # idle rows have seen nothing
        return split_queries(mixed, q_rckqh, mixed.shape[-1])

    def _spans(self, q_rckqh: jax.Array, table: jax.Array, page_size: int, rules: ScoreRules) -> list[Spans]:
        """Return the keys in common, if there are any, and those that each row reads for itself."""
        rows, length, _, per_head, _ = q_rckqh.shape
        q, room = flat_queries(q_rckqh, rules), table.shape[1] * page_size
        live = self.counts > 0
        ends = jnp.where(live, self.starts + self.counts, 0)
        last = jnp.repeat(jnp.minimum(self.positions, ends[:, None] - 1), per_head, axis=1)
        if rules.window is not None:  # windows are not worth sharing
            begins = jnp.maximum(self.starts + 1 - rules.window, 0) // KEY_BLOCK * KEY_BLOCK
            return [Spans(q, last, table, begins, ends, min(room, rules.window + length + KEY_BLOCK))]
        if self.shared is None:
            return [Spans(q, last, table, jnp.zeros_like(ends), ends, room)]
        tiles, padding = len(self.shared), len(self.shared) * self.tile - rows
        drawn = jnp.pad(live, (0, padding)).reshape(tiles, self.tile)
        shared = jnp.where(jnp.any(drawn, axis=1), self.shared, 0)
        seen = jnp.minimum(jnp.pad(last, ((0, padding), (0, 0))).reshape(tiles, -1), shared[:, None] - 1)
        in_tiles = _in_tiles(q, tiles, self.tile)
        common = Spans(in_tiles, seen, table[self.sources], jnp.zeros_like(shared), shared, room)
        begins = jnp.repeat(shared, self.tile, total_repeat_length=tiles * self.tile)[:rows]
        return [common, Spans(q, last, table, begins, ends, room)]


def _attend_spans(spans: Spans, page_size: int, read: ReadPages, at_once: int, rules: ScoreRules) -> Partial:
    """Return the results of each owner's splits, [t, splits, ...]; those that it does not have weigh nothing.

    Args:
        at_once: splits that are read at a time.
    """
    owners, counts = len(spans.table), spans.counts
    stops = jnp.cumsum(counts)
    starts, most = stops - counts, owners * spans.splits
    at_once = max(1, min(at_once, most))

    def attend(first: jax.Array | int) -> Partial:
        index = first + jnp.arange(at_once)
        owner = jnp.minimum(jnp.sum(stops <= index[:, None], axis=1), owners - 1)
        begin = spans.begins[owner] + (index - starts[owner]) * SPLIT
        end = jnp.where(index < stops[-1], spans.ends[owner], 0)
        columns = begin[:, None] // page_size + jnp.arange(SPLIT // page_size)
        pages = spans.table.at[owner[:, None], columns].get(mode="fill", fill_value=NULL_PAGE)
        window = read(jnp.where(columns * page_size < end[:, None], pages, NULL_PAGE), end - begin, begin[:, None])
        last = spans.last_tm[owner] - begin[:, None]
        scores = mask_scores(block_scores(_of_rows(spans.q_tkmh)[owner], window["k"]), 0, last, 1, rules)
        peak = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        mixed = weighted_sum(weights.astype(window["v"].dtype), window["v"])
        return Partial(*map(_of_rows, (peak, jnp.sum(weights, axis=-1, keepdims=True), mixed)))

    rounds = -(-most // at_once)
    found = attend(0) if rounds == 1 else _in_rounds(attend, rounds, at_once, stops[-1])
    index = jnp.minimum(starts[:, None] + jnp.arange(spans.splits), rounds * at_once - 1)
    there = jnp.arange(spans.splits) < counts[:, None]
    peak, total, mixed = (x[index] for x in found)
    return Partial(jnp.where(there[:, :, None, None, None], peak, MASKED), total, mixed)


def _in_rounds(attend: Callable[[jax.Array], Partial], rounds: int, at_once: int, splits: jax.Array) -> Partial:
    """Return the results of all splits, `at_once` in a round; rounds without any are left out."""
    each = jax.eval_shape(attend, jnp.int32(0))
    empty = [_of_rows(jnp.zeros((rounds * at_once, *one.shape[1:]), one.dtype)) for one in each]

    def body(number: jax.Array, found: Partial) -> Partial:
        first = number * at_once
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
        return jax.tree.map(write, found, attend(first))

    return jax.lax.fori_loop(0, (splits + at_once - 1) // at_once, body, Partial(*empty))


def _in_rows(x: jax.Array, rows: int, tile: int) -> jax.Array:
    """Return results of tiles [t, splits, k, tile * n, ...] as those of their rows [r, splits, k, n, ...]."""
    tiles, splits, heads, queries, width = x.shape
    if tiles == rows:
        return x
    x = jnp.reshape(
        x,
        (tiles, splits, heads, tile, queries // tile, width),
        out_sharding=partition(None, None, "heads", None, None, None),
    ).transpose(0, 3, 1, 2, 4, 5)
    shape = (tiles * tile, splits, heads, queries // tile, width)
    return jnp.reshape(x, shape, out_sharding=partition(None, None, "heads", None, None))[:rows]


def _of_rows(x_rk: jax.Array) -> jax.Array:
    return constrain(x_rk, None, "heads", None, None)


def _in_tiles(x_rknh: jax.Array, tiles: int, tile: int) -> jax.Array:
    """Return queries of rows [r, k, n, h] as those of tiles [t, k, tile * n, h], with zeros behind the last row."""
    rows, heads, queries, width = x_rknh.shape
    x = jnp.pad(_of_rows(x_rknh), [(0, tiles * tile - rows), (0, 0), (0, 0), (0, 0)])
    x = jnp.reshape(
        x, (tiles, tile, heads, queries, width), out_sharding=partition(None, None, "heads", None, None)
    ).transpose(0, 2, 1, 3, 4)
    shape = (tiles, heads, tile * queries, width)
    return jnp.reshape(x, shape, out_sharding=partition(None, "heads", None, None))
