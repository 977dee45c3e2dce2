"""Decoding by XLA on *windows*: the pages of each row, copied once into contiguous arrays for several steps.

A kernel would do this in fast memory; here the copy is amortised over steps. Rows are grouped, longest first, and each
group has its own window, divided into cells of ascending keys (`key_blocks`). A group reads as many cells as its
longest row needs, so rows of all lengths share a dispatch and its matrix products, while each reads little more than
its own keys. Cells are separate arrays because XLA's CPU backend copies whatever it slices from an array.

Shape letters: r rows, c tokens of each (1 without drafts), s keys of a cell; k, q, h as in attention/grouped_query.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, override

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.layers.contexts.blocks import KEY_BLOCK, attend_blocks, key_blocks
from axlearn_like.layers.contexts.int8_cache import as_held, as_read
from axlearn_like.layers.contexts.latents import Expand, page_size_of, read_expanded
from axlearn_like.layers.contexts.needed_blocks import attend_needed
from axlearn_like.layers.contexts.paged import Pool, read_window
from mesh.devices import platform
from mesh.programs.traced import traced_once, unknown
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


class Cache(NamedTuple):
    """The cache of one layer."""

    windows: Windows
    k: Any  # [steps, r, k, h], of the tokens fed since the windows were filled, as pages hold them (int8_cache.py)
    v: Any  # the same; None with latents, which are then the keys, [steps, r, w]


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
        pool: pool of all layers.
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
    """Return a cell of keys in blocks, [r, k, s / b, h, b], and values."""
    sharding = partition(None, "heads", None)
    return Cell(jnp.reshape(blocks, (*blocks.shape[:2], -1), out_sharding=sharding), v)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowContext:
    """One decoding step of every row on its window.

    Attributes:
        lengths: int32 [r], tokens of the row before the one now fed.
        needed: int32 [groups], cells that each group reads.
        step: int32, steps since the windows were filled.
        live: bool [r, 1], False in idle rows; None: there are none.
    """

    decodes: ClassVar[bool] = True

    lengths: jax.Array
    needed: jax.Array
    step: jax.Array
    live: Any = None

    @property
    def positions(self) -> jax.Array:
        """int32 [r, 1]."""
        return self.lengths[:, None]

    @property
    def _written(self) -> jax.Array:
        """Positions of the new tokens as they are written: one of each row, int32 [r]."""
        return self.lengths

    def attend(
        self, q_rckqh: jax.Array, k_rckh: jax.Array, v_rckh: jax.Array, cache: Cache, attention: AttentionParams
    ) -> tuple[jax.Array, Cache]:
        """Return attention over the window with the new token in it, and the updated cache."""
        k, v = (self._fed(x, "heads", None) for x in (k_rckh, v_rckh))
        new = as_held(k, cache.k), as_held(v, cache.v)
        k, v = (as_read(x, k.dtype) for x in new)
        mixed, windows = self._attend(q_rckqh, k, v, cache.windows, attention)
        return mixed, Cache(windows, *jax.tree.map(self._record, (cache.k, cache.v), new))

    def holds_latents(self, cache: Cache) -> bool:
        """Return True if the pages, which the windows are filled from, hold latents."""
        return cache.v is None

    def attend_latents(
        self, q_rckqh: jax.Array, latent_rcw: jax.Array, cache: Cache, attention: AttentionParams, expand: Expand
    ) -> tuple[jax.Array, Cache]:
        """Return `attend` where the pages hold latents; windows hold what `expand` makes of them."""
        k, v = (self._fed(x, "heads", None) for x in expand(latent_rcw, self.positions))
        mixed, windows = self._attend(q_rckqh, k, v, cache.windows, attention)
        latent = self._fed(latent_rcw, None, dtype=cache.k.dtype)
        return mixed, Cache(windows, self._record(cache.k, latent), None)

    def _fed(self, x: jax.Array, *axes: str | None, dtype: DTypeLike | None = None) -> jax.Array:
        """Return what is fed now of each row, [r, 1, ...], without the axis of tokens, on every device."""
        return constrain(x[:, 0].astype(dtype or x.dtype), None, *axes)

    def _record(self, tokens: jax.Array, new: jax.Array) -> jax.Array:
        """Return [steps, r, ...] with the tokens fed now."""
        return jax.lax.dynamic_update_index_in_dim(tokens, new, self.step, 0)

    def _attend(
        self, q_rckqh: jax.Array, k: jax.Array, v: jax.Array, groups: Windows, attention: AttentionParams
    ) -> tuple[jax.Array, Windows]:
        mixed, windows, first = [], [], 0
        for group, cells in enumerate(groups):
            rows = slice(first, first := first + cells[0].v.shape[0])
            cells = put(cells, k[rows], v[rows], self._written[rows])
            mixed.append(_attend_cells(q_rckqh[rows], cells, self.needed[group], self.positions[rows], attention))
            windows.append(cells)
        return jnp.concatenate(mixed) if len(mixed) > 1 else mixed[0], tuple(windows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftContext(WindowContext):
    """One step with drafts: of each row the last token, and drafted ones behind it (rl/rollout/model_runner/verify.py).

    Attributes:
        step: int32 [r], tokens of the row since the windows were filled.
        live: bool [r, c], False at places without a draft and in idle rows.
        chunk: c.
    """

    chunk: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def positions(self) -> jax.Array:
        """int32 [r, c]."""
        return self.lengths[:, None] + jnp.arange(self.chunk)

    @property
    def _written(self) -> jax.Array:
        return self.positions

    @override
    def _fed(self, x: jax.Array, *axes: str | None, dtype: DTypeLike | None = None) -> jax.Array:
        return constrain(x.astype(dtype or x.dtype), None, None, *axes)

    @override
    def _record(self, tokens: jax.Array, new: jax.Array) -> jax.Array:
        """Return [t, r, ...] with those fed now, [r, c, ...]; what is not kept of them is written over next."""
        rows = jnp.arange(self.lengths.shape[0])[:, None]
        return tokens.at[self.step[:, None] + jnp.arange(self.chunk), rows].set(new, mode="drop")


def _attend_cells(
    q_rckqh: jax.Array, cells: Sequence[Cell], needed: jax.Array, positions: jax.Array, attention: AttentionParams
) -> jax.Array:
    """Return attention over the first `needed` cells."""
    keys, values = [cell.blocks for cell in cells], [cell.v for cell in cells]
    if platform() == "cpu":
        return attend_needed(q_rckqh, keys, values, needed, positions, attention)
    # Elsewhere a condition waits for the device, so there is one.
    variants = [
        partial(attend_blocks, keys=keys[:count], values=values[:count], positions=positions, attention=attention)
        for count in range(1, len(cells) + 1)
    ]
    return jax.lax.switch(needed - 1, variants, q_rckqh)


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
