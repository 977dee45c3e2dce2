"""The arrays of the KV cache on the devices: the pages of all layers, and the windows that rows decode in."""

from collections.abc import Sequence as Items
from typing import Any

import jax
from jax.sharding import Mesh

from axlearn_like.layers.contexts.blocks import KEY_BLOCK, key_blocks
from axlearn_like.layers.contexts.cascade import Tile, make_tile, tile_rows
from axlearn_like.layers.contexts.cells import Cell, make_window
from axlearn_like.layers.contexts.int8_cache import make_int8_pool
from axlearn_like.layers.contexts.latents import make_latent_pool
from axlearn_like.layers.contexts.paged import make_pool
from mesh import to_named_sharding
from rl.rollout.config import EngineConfig
from rl.rollout.model_runner.shapes.buckets import Buckets

_WindowKey = tuple[int, int, bool]  # index of the group or tile, its rows, True for a tile


class CacheArrays:
    """The page pool and the windows of one model runner. Its mesh is in force where arrays are made."""

    def __init__(
        self, cfg: EngineConfig[Any], model: Any, buckets: Buckets, *, kernel: bool, in_pages: bool, expanded: bool
    ):
        """Describe the arrays; `take` allocates the pool.

        Args:
            model: abstract, as the engine computes with it.
            kernel: pages are in the form of the kernel for TPUs.
            in_pages: decoding reads the pages themselves, so there are no windows.
            expanded: the keys of all heads are cached; otherwise the latents of a model that has them.
        """
        self.layers: int = model.num_layers  # number of layers of the model
        self._cfg, self._buckets, self._kernel, self._in_pages = cfg, buckets, kernel, in_pages
        self._dtype = model.dtype
        self._cache_shape: tuple[int, int] = model.cache_shape  # heads and width
        self._window_shape: tuple[int, int] = model.window_shape
        # Ranks of keys and values, where pages hold these in rank space.
        ranks = {getattr(block.attention, "cache_ranks", None) for block, _ in model.kinds()}
        self._ranks: tuple[int, int] | None = ranks.pop() if len(ranks) == 1 else None
        self._latent_width: int | None = None if expanded and self._ranks is None else model.latent_width
        step = max(KEY_BLOCK // 2, cfg.page_size)
        self._keys = -(-cfg.longest // step) * step  # keys of a window
        self._windows: dict[_WindowKey, list[Any]] = {}
        self._described: Mesh | None = None
        self.pool: Any = None  # the pages of all layers; None after `drop`

    def drop(self) -> None:
        """Give back the memory of pages and windows."""
        self.pool = None
        self._windows.clear()

    def take(self) -> None:
        """Take the memory of the pages again, which are empty then, unless it is held."""
        if self.pool is None:
            self.pool = self._empty_pool()

    def describe(self, mesh: Mesh) -> None:
        """Take no memory: pool and windows are described, on devices that are not there."""
        self._described = mesh
        self.pool = to_named_sharding(jax.eval_shape(self._empty_pool), mesh)

    @property
    def block_ends(self) -> list[int]:
        """The end of each block of keys of the longest sequences."""
        if self._in_pages:
            return list(range(KEY_BLOCK, self._buckets.widest + 1, KEY_BLOCK))
        return [block.stop for block in key_blocks(self._keys, self._window_shape[1])]

    def windows(self, rows: int, *, tiled: bool = False) -> list[list[Any]]:
        """Return windows to decode in, by layer and group of rows. Kept: allocation takes a tenth of a dispatch."""
        if self._in_pages:
            return []
        keys = self._window_keys(rows, tiled=tiled)
        if self._described is not None:
            empty = jax.eval_shape(lambda: [self._make_window(*key[1:]) for key in keys])
            return [to_named_sharding(empty, self._described)] * self.layers
        for key in keys:
            if key not in self._windows:
                self._windows[key] = [self._make_window(*key[1:]) for _ in range(self.layers)]
        return [[self._windows[key][layer] for key in keys] for layer in range(self.layers)]

    def keep_windows(self, rows: int, windows: Items[Items[Any]], *, tiled: bool) -> None:
        """Store the windows that a dispatch returns in the place of those that it was given."""
        for layer, groups in enumerate(windows):
            for key, cells in zip(self._window_keys(rows, tiled=tiled), groups, strict=True):
                self._windows[key][layer] = cells

    def _window_keys(self, rows: int, *, tiled: bool) -> list[_WindowKey]:
        sizes = tile_rows(rows, min(rows, self._cfg.cascade or rows)) if tiled else self._buckets.groups(rows)
        return [(index, size, tiled) for index, size in enumerate(sizes)]

    def _make_window(self, rows: int, tiled: bool) -> Tile | tuple[Cell, ...]:
        heads, width = self._window_shape
        make = make_tile if tiled else make_window
        return make(rows, self._keys, kv_heads=heads, head_dim=width, dtype=self._dtype)

    def _empty_pool(self) -> Any:
        """Return the pages of all layers."""
        heads, width = self._cache_shape
        pages, page_size = self._cfg.pool_pages, self._cfg.page_size
        rounded = self._cfg.kv_cache_dtype == "int8"
        if self._kernel:
            from axlearn_like.kernels.paged_attention.int8 import make_int8_kernel_pool
            from axlearn_like.kernels.paged_attention.pages import make_pool as make_kernel_pool

            if self._ranks is not None:
                from axlearn_like.kernels.low_rank.factors import make_rank_pool

                return make_rank_pool(self.layers, pages, page_size, max(self._ranks), self._dtype)
            if rounded:
                return make_int8_kernel_pool(self.layers, pages, page_size, heads, width)
            return make_kernel_pool(self.layers, pages, page_size, heads, width, self._dtype)
        sizes: dict[str, Any] = {"layers": self.layers, "pages": pages, "page_size": page_size}
        if self._latent_width is not None:
            return make_latent_pool(**sizes, width=self._latent_width, dtype=self._dtype)
        sizes |= {"kv_heads": heads, "head_dim": width}
        if rounded:
            return make_int8_pool(**sizes)
        return make_pool(**sizes, dtype=self._dtype)
