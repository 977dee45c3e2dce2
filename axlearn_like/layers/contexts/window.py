"""Decoding by XLA on *windows*: the pages of each row, copied once into contiguous arrays for several steps.

A kernel would do this in fast memory; here the copy is amortised over steps. Rows are grouped, longest first, and each
group has its own window, divided into cells of ascending keys (cells.py). A group reads as many cells as its longest
row needs, so rows of all lengths share a dispatch and its matrix products, while each reads little more than its own
keys.

`attend_needed` attends over as many blocks of keys as some rows need, which is known only when the program runs. A
program for each number of blocks would hold n (n + 1) / 2 products with the keys of n blocks, in each layer and for
each group of rows, all of which XLA compiles. Here each block stands once, in a condition within that of the block
before it: scores on the way in; exponentials and sums on the way out, when the largest score of all is known. Blocks
that are not needed are not read. Sums of the others are taken as by `attend_blocks`, to the bit.

Shape letters: r rows, c tokens of each (1 without drafts), s keys of a cell; k, q, h as in attention/grouped_query.py.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, override

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.deterministic import KEYS_AT_ONCE, key_sums, key_weights, no_fuse
from axlearn_like.layers.contexts.blocks import (
    attend_blocks,
    block_scores,
    flat_queries,
    key_blocks,
    mask_scores,
    require_causal,
    split_queries,
    total_with_sinks,
    weighted_sum,
)
from axlearn_like.layers.contexts.cells import Cell, Windows, put
from axlearn_like.layers.contexts.int8_cache import as_held, as_read
from axlearn_like.layers.contexts.latents import Expand
from mesh.devices import platform
from mesh.programs.shared import unknown
from mesh.rules import constrain


class Cache(NamedTuple):
    """The cache of one layer."""

    windows: Windows
    k: Any  # [steps, r, k, h], of the tokens fed since the windows were filled, as pages hold them (int8_cache.py)
    v: Any  # the same; None with latents, which are then the keys, [steps, r, w]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowContext:
    """One decoding step of every row on its window."""

    decodes: ClassVar[bool] = True

    lengths: jax.Array  # int32 [r], tokens of the row before the one now fed
    needed: jax.Array  # int32 [groups], cells that each group reads
    step: jax.Array  # int32, steps since the windows were filled
    live: Any = None  # bool [r, 1], False in idle rows; None: there are none

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
    keys, values = [cell.blocks for cell in cells], [cell.v for cell in cells]
    if platform() == "cpu":
        return attend_needed(q_rckqh, keys, values, needed, positions, attention)
    # Elsewhere a condition waits for the device, so there is one.
    variants = [
        partial(attend_blocks, keys=keys[:count], values=values[:count], positions=positions, attention=attention)
        for count in range(1, len(cells) + 1)
    ]
    return jax.lax.switch(needed - 1, variants, q_rckqh)


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
