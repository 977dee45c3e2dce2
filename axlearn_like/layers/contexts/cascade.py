"""Decoding on keys in common: what the rows of a *tile* share is read once for all of them ("cascade" attention).

The samples of a group have their prompt's keys and values in common, down to the bit. Blocks of keys (`key_blocks`)
that lie within them are copied once for a tile, and all queries of the tile are rows of one product with them; what is
behind them each row has for itself (`WindowContext`). No sum is cut anywhere else for this: the blocks begin at the
fixed positions of all contexts, scores of shared and own keys meet before the softmax, and the weighted sums of blocks
are added in their order. So results are those of decoding without sharing, to the bit in float32 on CPUs, whichever
rows share them.

Shape letters: as in window.py; t tiles.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.attention.interface import MASKED, ScoreRules
from axlearn_like.kernels.deterministic import key_sum, no_fuse
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.kernels.paged_attention.rows import PagedRows, SharedTiles
from axlearn_like.layers.contexts.blocks import (
    block_scores,
    flat_queries,
    key_blocks,
    mask_scores,
    split_queries,
    total_with_sinks,
    weighted_sum,
)
from axlearn_like.layers.contexts.cells import Cell, fill_cells, make_window, put
from axlearn_like.layers.contexts.paged import PagedContext, Pool
from axlearn_like.layers.contexts.window import WindowContext
from mesh.rules import constrain, partition


class Tile(NamedTuple):
    """The windows of some rows of one layer: cells of ascending keys, of each row and of all in common."""

    own: tuple[Cell, ...]
    shared: tuple[Cell, ...]  # cells of one row

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return self.own[0].v.shape[0]

    @property
    def blocks(self) -> list[slice]:
        """The keys of each cell."""
        return key_blocks(sum(cell.v.shape[2] for cell in self.own), self.own[0].v.shape[-1])


def make_tile(rows: int, keys: int, **sizes: Any) -> Tile:
    """Return empty cells of one tile and layer; arguments as of `make_window`."""
    return Tile(make_window(rows, keys, **sizes), make_window(1, keys, **sizes))


def tile_rows(rows: int, size: int) -> list[int]:
    """Return the rows of each tile of a dispatch: `size`, and fewer in the last."""
    whole, rest = divmod(rows, size)
    return [size] * whole + [rest] * (rest > 0)


def fill_tiles(
    tiles: Sequence[Sequence[Tile]],
    pool: Pool,
    tables: Sequence[jax.Array],
    lengths: jax.Array,
    needed: jax.Array,
    shared: jax.Array,
    sources: jax.Array,
) -> tuple[tuple[Tile, ...], ...]:
    """Return tiles with pages copied into the cells that are read, in place.

    Args:
        tiles: tiles of each layer; their contents do not matter.
        tables: page tables of the layers, int32 [r, pages of a row].
        lengths: int32 [r], tokens in the pool.
        needed: int32 [t], cells that a tile reads.
        shared: int32 [t], how many of them its rows have in common.
        sources: int32 [t], the row whose pages are copied for all of a tile.
    """
    filled, first, expands = [], 0, [None] * len(tiles)
    for index, tile in enumerate(tiles[0]):
        rows = slice(first, first := first + tile.rows)
        cells, of_layers = range(len(tile.own)), [layer[index] for layer in tiles]
        wanted = [(cell >= shared[index]) & (cell < needed[index]) for cell in cells]
        common = [cell < shared[index] for cell in cells]
        source = sources[index][None]
        parts = [table[rows] for table in tables], lengths[rows], wanted
        own = fill_cells([layer.own for layer in of_layers], pool, *parts, expands)
        parts = [table[source] for table in tables], lengths[source], common
        filled.append(list(map(Tile, own, fill_cells([layer.shared for layer in of_layers], pool, *parts, expands))))
    return tuple(zip(*filled, strict=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CascadeContext(WindowContext):
    """One decoding step of every row on the windows of its tile.

    Attributes:
        needed: int32 [t], cells that a tile reads.
        shared: int32 [t], how many of them its rows have in common, all behind them included that is needed.
    """

    shared: Any = None

    def _attend(
        self, q_rckqh: jax.Array, k: jax.Array, v: jax.Array, groups: Any, attention: AttentionParams
    ) -> tuple[jax.Array, Any]:
        mixed, tiles, first = [], [], 0
        live = jnp.ones_like(self.lengths, bool) if self.live is None else self.live[:, 0]
        for index, tile in enumerate(groups):
            rows = slice(first, first := first + tile.rows)
            written = self.lengths[rows], live[rows], self.shared[index]
            own = put(tile.own, k[rows], v[rows], self.lengths[rows])
            tile = Tile(own, _put_shared(tile, k[rows], v[rows], *written))
            parts = tile, self.needed[index], self.shared[index], self.positions[rows]
            mixed.append(attend_tile(q_rckqh[rows], *parts, attention))
            tiles.append(tile)
        return jnp.concatenate(mixed) if len(mixed) > 1 else mixed[0], tuple(tiles)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CascadePagedContext(PagedContext):
    """One decoding step of every row on the pages, by the kernel for TPUs."""

    shared: Any = None  # int32 [t], keys that the rows of a tile have in common, whole pages of them
    sources: Any = None  # int32 [t], the row whose pages hold them
    tile: int = dataclasses.field(default=1, metadata={"static": True})  # rows of a tile

    @override
    def _by_kernel(
        self, kernel: PagedKernel, rows: PagedRows, pool: Any, attention: AttentionParams
    ) -> tuple[jax.Array, Any]:
        tiles = SharedTiles(self.shared, self.sources, self.tile)
        return kernel.attend_shared(rows, pool, tiles, rules=attention.rules)


def _put_shared(
    tile: Tile, k: jax.Array, v: jax.Array, lengths: jax.Array, live: jax.Array, shared: jax.Array
) -> tuple[Cell, ...]:
    """Return the shared cells with the tokens in them that are fed only now.

    Those are the last of a prompt: rows that begin have not written it yet. It is the same token at the same place
    after the same keys, so whichever row writes it, the bits are the same.
    """
    ends = jnp.array([0, *(block.stop for block in tile.blocks)])
    inside = live & (lengths < ends[shared])
    places = jnp.where(inside, lengths, ends[-1])  # place past all cells: nothing is written
    rounds = jnp.any(inside).astype(jnp.int32)  # a loop of one round or none works in place
    return jax.lax.fori_loop(
        0, rounds, lambda _, cells: put(cells, k, v, places, rows=jnp.zeros_like(places)), tile.shared
    )


def attend_tile(
    q_rckqh: jax.Array,
    tile: Tile,
    needed: jax.Array,
    shared: jax.Array,
    positions: jax.Array,
    attention: AttentionParams,
) -> jax.Array:
    """Return what `attend_blocks` returns for the first `needed` cells, of which `shared` are those in common.

    Between the products all rows of the tile are those of one, [1, k, r * n, s]: of shared keys, which are the most,
    nothing is moved.
    """
    rules, blocks, width = attention.rules, tile.blocks, tile.own[0].v.shape[-1]
    rows, length, heads, per_head, _ = q_rckqh.shape
    q, count = flat_queries(q_rckqh, rules), length * per_head
    together = _in_one_row(q)
    kinds = [jnp.where(index < shared, 1, jnp.where(index < needed, 2, 0)) for index in range(len(blocks))]

    scores = []
    for block, kind, own, common in zip(blocks, kinds, tile.own, tile.shared, strict=True):
        mask = partial(mask_scores, start=block.start, positions=positions, per_head=per_head, rules=rules)
        nothing = partial(_filled, (1, heads, rows * count, block.stop - block.start), MASKED)
        ways = [nothing, partial(_shared_scores, mask, rules), partial(_own_scores, mask)]
        scores.append(jax.lax.switch(kind, ways, q, together, own, common))
    peak = no_fuse(functools.reduce(jnp.maximum, [jnp.max(part, axis=-1, keepdims=True) for part in scores]))
    weights, parts = [], []
    for kind, part, own, common in zip(kinds, scores, tile.own, tile.shared, strict=True):
        ways = [partial(_no_values, width), _shared_values, partial(_own_values, rows)]
        found, mixed = jax.lax.switch(kind, ways, part, peak, own, common)
        weights.append(found)
        parts.append(mixed)
    sums = [lambda *of_cells, count=count: key_sum(*of_cells[:count]) for count in range(1, len(blocks) + 1)]
    total = jax.lax.switch(needed - 1, sums, *weights)
    mixed = functools.reduce(jnp.add, parts)
    mixed, total, peak = (_in_rows(x, rows) for x in (mixed, total, peak))
    return split_queries(mixed / total_with_sinks(total, peak, attention.sinks, length), q_rckqh, width)


def _filled(shape: tuple[int, ...], value: float, *_: Any) -> jax.Array:
    return constrain(jnp.full(shape, value, jnp.float32), None, "heads", None, None)


def _exponentials(scores: jax.Array, peak: jax.Array) -> jax.Array:
    return no_fuse(jnp.exp(scores - peak))


Mask = Callable[[jax.Array], jax.Array]


def _own_scores(mask: Mask, q_rknh: jax.Array, together: jax.Array, own: Cell, common: Cell) -> jax.Array:
    keys = constrain(own.blocks, "batch", "heads", None, None, None)
    return _in_one_row(mask(block_scores(q_rknh, keys)))


def _shared_scores(
    mask: Mask, rules: ScoreRules, q_rknh: jax.Array, together: jax.Array, own: Cell, common: Cell
) -> jax.Array:
    scores = block_scores(together, common.blocks)
    if rules.window is None and rules.soft_cap is None:
        return scores  # all rows see all keys that they have in common
    return _in_one_row(mask(_in_rows(scores, len(q_rknh))))


def _no_values(width: int, scores: jax.Array, peak: jax.Array, own: Cell, common: Cell) -> tuple[jax.Array, jax.Array]:
    """Return weights of zero, and their sum of values."""
    return jnp.zeros_like(scores), _filled((*scores.shape[:-1], width), 0.0)


def _own_values(rows: int, scores: jax.Array, peak: jax.Array, own: Cell, common: Cell) -> tuple[jax.Array, jax.Array]:
    weights, v = _exponentials(scores, peak), constrain(own.v, "batch", "heads", None, None)
    return weights, _in_one_row(weighted_sum(_in_rows(weights.astype(v.dtype), rows), v))


def _shared_values(scores: jax.Array, peak: jax.Array, own: Cell, common: Cell) -> tuple[jax.Array, jax.Array]:
    weights = _exponentials(scores, peak)
    return weights, weighted_sum(weights.astype(common.v.dtype), common.v)


def _in_one_row(x_rknh: jax.Array) -> jax.Array:
    rows, heads, count, width = x_rknh.shape
    x = constrain(x_rknh, None, "heads", None, None).transpose(1, 0, 2, 3)
    return jnp.reshape(x, (1, heads, rows * count, width), out_sharding=partition(None, "heads", None, None))


def _in_rows(x: jax.Array, rows: int) -> jax.Array:
    _, heads, _, width = x.shape
    x = jnp.reshape(x, (heads, rows, -1, width), out_sharding=partition("heads", None, None, None))
    return constrain(x.transpose(1, 0, 2, 3), "batch", "heads", None, None)
