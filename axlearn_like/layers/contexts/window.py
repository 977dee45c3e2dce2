"""Decoding by XLA on *windows*: the pages of each row, copied once into contiguous arrays for several steps.

A kernel would do this in fast memory; here the copy is amortised over steps. Rows are grouped, longest first, and each
group has its own window, divided into cells of ascending keys (cells.py). A group reads as many cells as its longest
row needs, so rows of all lengths share a dispatch and its matrix products, while each reads little more than its own
keys.

Shape letters: r rows, c tokens of each (1 without drafts), s keys of a cell; k, q, h as in attention/grouped_query.py.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, override

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.layers.contexts.blocks import attend_blocks
from axlearn_like.layers.contexts.cells import Cell, Windows, put
from axlearn_like.layers.contexts.int8_cache import as_held, as_read
from axlearn_like.layers.contexts.latents import Expand
from axlearn_like.layers.contexts.needed_blocks import attend_needed
from mesh.devices import platform
from mesh.rules import constrain


class Cache(NamedTuple):
    """The cache of one layer."""

    windows: Windows
    k: Any  # [steps, r, k, h], of the tokens fed since the windows were filled, as pages hold them (int8_cache.py)
    v: Any  # the same; None with latents, which are then the keys, [steps, r, w]


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
