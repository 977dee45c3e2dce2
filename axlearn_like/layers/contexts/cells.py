"""Cells of windows: contiguous arrays of some rows' ascending keys, and their values, filled from pages.

Cells are separate arrays because XLA's CPU backend copies whatever it slices from an array. Shape letters as in
window.py, which decodes on them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axlearn_like.layers.contexts.blocks import KEY_BLOCK, key_blocks
from axlearn_like.layers.contexts.latents import Expand, page_size_of, read_expanded
from axlearn_like.layers.contexts.paged import Pool, read_window
from mesh.programs.shared import traced_once, unknown
from mesh.rules import constrain, partition


class Cell(NamedTuple):
    """Some keys of a group of rows, and their values."""

    # [r, k, s / b * h * b], b keys at a time: 64, which a product of few queries reads in order, 1.6 times as fast as
    # [r, k, h, s]; half of that where a window ends within a block; all where they are one row's, which a tile of rows
    # has in common: a product of many queries is as fast on them, and its result is in order. Three axes are one, as
    # XLA would otherwise choose a layout and copy them at the start and end of each dispatch.
    k: Any
    v: Any  # [r, k, s, h]

    @property
    def blocks(self) -> jax.Array:
        """The keys, [r, k, s / b, h, b]."""
        rows, heads, size, width = self.v.shape
        sharding = partition(None, "heads", None, None, None)
        return jnp.reshape(self.k, (rows, heads, -1, width, _keys_at_once(rows, size)), out_sharding=sharding)


def _keys_at_once(rows: int, keys: int) -> int:
    if rows == 1:
        return keys
    return KEY_BLOCK // 2 if keys % KEY_BLOCK else KEY_BLOCK


Windows = Sequence[Sequence[Cell]]  # one layer: groups of rows, cells of ascending keys


def make_window(rows: int, keys: int, *, kv_heads: int, head_dim: int, dtype: Any) -> tuple[Cell, ...]:
    """Return empty cells of one group and layer, for `keys` tokens, a multiple of 32."""

    def empty(*shape: int) -> jax.Array:
        return constrain(jnp.zeros((rows, kv_heads, *shape), dtype), None, "heads", *[None] * len(shape))

    sizes = [block.stop - block.start for block in key_blocks(keys, head_dim)]
    return tuple(Cell(empty(s * head_dim), empty(s, head_dim)) for s in sizes)


def cells_needed(windows: Windows, tokens: jax.Array) -> jax.Array:
    """Return int32 [groups], cells that hold so many tokens of each row, int32 [r]; at least 1."""
    found, first = [], 0
    for cells in windows:
        rows, ends = cells[0].v.shape[0], jnp.cumsum(jnp.array([cell.v.shape[2] for cell in cells]))
        found.append(1 + jnp.sum(ends[:-1] < jnp.max(tokens[first : first + rows]), dtype=jnp.int32))
        first += rows
    return jnp.stack(found)


def fill(
    windows: Sequence[Windows],
    pool: Pool,
    tables: Sequence[jax.Array],
    lengths: jax.Array,
    needed: jax.Array,
    expands: Sequence[Expand | None],
) -> tuple[Windows, ...]:
    """Return windows with pages copied into the cells that are needed, in place; others are neither read nor written.

    Args:
        windows: windows of each layer; their contents do not matter.
        tables: page tables of the layers, int32 [r, pages of a row].
        lengths: int32 [r], tokens in the pool; values behind are zero (see `read_window`).
        needed: int32 [groups], see `cells_needed`.
        expands: functions that make keys and values of each layer's latents, if the pool holds those.
    """
    filled, first = [], 0
    for group, cells in enumerate(windows[0]):
        rows = slice(first, first := first + cells[0].v.shape[0])
        read = [needed[group] > index for index in range(len(cells))]
        own = [window[group] for window in windows]
        filled.append(fill_cells(own, pool, [table[rows] for table in tables], lengths[rows], read, expands))
    return tuple(zip(*filled, strict=True))


def fill_cells(
    cells: Sequence[Sequence[Cell]],
    pool: Pool,
    tables: Sequence[jax.Array],
    lengths: jax.Array,
    wanted: Sequence[jax.Array],
    expands: Sequence[Expand | None],
) -> list[tuple[Cell, ...]]:
    """Return each layer's cells of some rows with their pages copied into those that are wanted, in place; see `fill`.

    One loop fills the cell of all layers: XLA's CPU backend compiles each small loop by itself, however many are alike.
    """
    page_size, new = page_size_of(pool), []
    blocks = key_blocks(sum(cell.v.shape[2] for cell in cells[0]), cells[0][0].v.shape[-1])
    for block, one, *of_layers in zip(blocks, wanted, *cells, strict=True):
        first, count = unknown(block.start // page_size), (block.stop - block.start) // page_size
        pages = [jax.lax.dynamic_slice_in_dim(table, first, count, axis=1) for table in tables]
        read = partial(_read_cells, pool, pages, lengths, first * page_size, expands, of_layers[0].v.dtype)
        # A loop of one round or none updates the cells in place; a condition would copy them.
        rounds = one.astype(jnp.int32)
        new.append(jax.lax.fori_loop(0, rounds, lambda round_, _, read=read: read(round_), of_layers))
    return list(zip(*new, strict=True))


def _read_cells(
    pool: Pool,
    pages: Sequence[jax.Array],
    lengths: jax.Array,
    first: jax.Array,
    expands: Sequence[Expand | None],
    dtype: DTypeLike,
    zero: jax.Array,
) -> list[Cell]:
    """Return a cell of each layer, of keys from the position `first` on; traced once where all layers read alike."""
    lengths = lengths - first
    # `zero`, the number of a round, keeps XLA from hoisting the reads out of the loop.
    alike = traced_once(lambda pool, pages, lengths, zero: _as_cell(read_window(pool, pages + zero, lengths, dtype)))
    return [
        alike(pool, own, lengths, zero)
        if expand is None
        else _as_cell(read_expanded(pool, own + zero, lengths, expand, first))
        for own, expand in zip(pages, expands, strict=True)
    ]


def _as_cell(window: Mapping[str, jax.Array]) -> Cell:
    rows, heads, head_dim, size = window["k"].shape
    sharding = partition(None, "heads", None, None, None)
    at_once = _keys_at_once(rows, size)
    k = jnp.reshape(window["k"], (rows, heads, head_dim, size // at_once, at_once), out_sharding=sharding)
    return _cell(k.transpose(0, 1, 3, 2, 4), window["v"])


def _cell(blocks: jax.Array, v: jax.Array) -> Cell:
    sharding = partition(None, "heads", None)
    return Cell(jnp.reshape(blocks, (*blocks.shape[:2], -1), out_sharding=sharding), v)


def put(
    cells: Sequence[Cell], k: jax.Array, v: jax.Array, positions: jax.Array, rows: jax.Array | None = None
) -> tuple[Cell, ...]:
    """Return the cells with new tokens in the cells of their positions, and in these rows, if given; in place.

    One of each row, k and v [r, k, h] at positions [r], or some of each, [r, c, k, h] at [r, c].
    """
    new: list[Cell] = []
    if rows is None:
        rows = jnp.arange(positions.shape[0])
        rows = rows if positions.ndim == 1 else rows[:, None]
    for cell, block in zip(cells, key_blocks(sum(cell.v.shape[2] for cell in cells), v.shape[-1]), strict=True):
        at = positions - block.start
        at = jnp.where(at < 0, block.stop, at)  # out of range, so nothing is written
        blocks, shape = cell.blocks, cell.v.shape
        at_once = blocks.shape[-1]
        places = at // at_once, at % at_once  # pair of both, so XLA makes one array
        split = (*shape[:2], -1, at_once, shape[3])
        values = jnp.reshape(cell.v, split, out_sharding=partition(None, "heads", None, None, None))
        values = values.at[rows, :, *places].set(v, mode="drop")
        keys = blocks.at[rows, :, places[0], :, places[1]].set(k, mode="drop")
        new.append(_cell(keys, jnp.reshape(values, shape, out_sharding=partition(None, "heads", None, None))))
    return tuple(new)
