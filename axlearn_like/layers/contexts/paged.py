"""Contexts with a paged KV cache: prefill and decoding.

The keys and values of all layers are stored in one pool of pages; a page holds `page_size` tokens of one layer, and
layer l's page p is row `l * pages + p` of the pool. A sequence owns a list of pages (its row of the page table), so
memory follows the tokens that exist, and sequences with a common beginning can share pages.

* `PagedContext`: reads and writes the pool at every call. Prefill everywhere, decoding on TPUs.
* `PagedDecodeContext` (paged_decode.py): the same for decoding by XLA, a part of the pages at a time: on GPUs.
* `RowContext`: whole sequences without a cache, in the same order: scoring.
* `WindowContext` (window.py): decoding by XLA, several steps on copies of the pages: on CPUs.

All but `PagedDecodeContext` reduce in the same order: keys ascending by position, from the first token of the
sequence, in blocks that begin at fixed positions (`key_blocks`). Padding at the end adds exact zeros, so a token's
output does not depend on chunk, window or batch (see `attend_blocks`).

Shape letters: r rows (one sequence each), c tokens of a row's chunk, w pages of a row, s keys of a window;
k, q, h as in attention/grouped_query.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axlearn_like.kernels.attention.dispatch import AttentionParams, attend, platform, stores_scores
from axlearn_like.kernels.exact.scope import exact_kernels
from axlearn_like.kernels.int8_heads import Rounded, round_heads
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.kernels.paged_attention.rows import PagedRows, RankRows
from axlearn_like.layers.contexts.blocks import KEY_BLOCK, attend_blocks, key_blocks
from axlearn_like.layers.contexts.int8_cache import is_int8, read_pages, write_rounded
from axlearn_like.layers.contexts.latents import Expand, has_latents, page_size_of, read_expanded, write_latents
from axlearn_like.layers.contexts.packed import require_complete_rows
from axlearn_like.layers.wrappers.low_rank.rank_space import RankSpace
from mesh.rules import constrain, partition

Pool = Any  # dict of k, v (see `make_pool`), with scales (int8_cache.py), or latent (latents.py); or the TPU kernel's
Window = dict[str, jax.Array]  # k [r, k, h, s], v [r, k, s, h]
# Pages [r, w]; how many of their tokens are written, [r]; position of the first one, int or [r, 1] -> pages as rows.
ReadPages = Callable[[jax.Array, jax.Array, jax.Array | int], Window]

NULL_PAGE = 0  # the page that padding is written to; no sequence owns it


def make_pool(*, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: Any) -> Pool:
    """Return an empty pool: k [layers * pages, k, h, page_size], v [layers * pages, k, page_size, h]."""

    def empty(*shape: int) -> jax.Array:
        return constrain(jnp.zeros((layers * pages, kv_heads, *shape), dtype), None, "heads", None, None)

    return {"k": empty(head_dim, page_size), "v": empty(page_size, head_dim)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedContext:
    """A chunk of tokens of each row, after what the row has in the pool; the layer's cache is (pool, layer index)."""

    decodes: ClassVar[bool] = False

    page_table: jax.Array  # int32 [r, w]
    starts: jax.Array  # int32 [r], tokens of the row already in the pool
    counts: jax.Array  # int32 [r], live tokens of the chunk; the rest is padding
    chunk: int = dataclasses.field(metadata={"static": True})  # c
    pages: int = dataclasses.field(metadata={"static": True})  # pages of one layer
    # Kernel for TPUs, whose layout the pool then has; None: XLA
    kernel: PagedKernel | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def positions(self) -> jax.Array:
        """int32 [r, c]."""
        return self.starts[:, None] + jnp.arange(self.chunk)

    @property
    def live(self) -> jax.Array:
        """Mask of the tokens that are not padding, bool [r, c]."""
        return jnp.arange(self.chunk) < self.counts[:, None]

    def attend(
        self,
        q_rckqh: jax.Array,
        k_rckh: jax.Array,
        v_rckh: jax.Array,
        cache: tuple[Pool, jax.Array],
        attention: AttentionParams,
    ) -> tuple[jax.Array, tuple[Pool, jax.Array]]:
        """Return attention over the pool with the chunk written to it, and (pool, layer index)."""
        pool, layer = cache
        table = self.page_table + layer * self.pages
        if self.kernel is not None:
            rows = PagedRows(q_rckqh, k_rckh, v_rckh, table, self.starts, self.counts)
            mixed, pool = self._by_kernel(self.kernel, rows, pool, attention)
            return mixed, (pool, layer)
        pool = write_tokens(pool, k_rckh, v_rckh, table, self.positions, self.live)

        def read(pages: jax.Array, lengths: jax.Array, first: jax.Array | int) -> Window:
            return read_window(pool, pages, lengths, k_rckh.dtype)

        return self._by_xla(q_rckqh, table, page_size_of(pool), read, attention), (pool, layer)

    def _by_xla(
        self, q_rckqh: jax.Array, table: jax.Array, page_size: int, read: ReadPages, attention: AttentionParams
    ) -> jax.Array:
        return attend_window(q_rckqh, read(table, self.starts + self.counts, 0), self.positions, attention)

    def _by_kernel(
        self, kernel: PagedKernel, rows: PagedRows, pool: Any, attention: AttentionParams
    ) -> tuple[jax.Array, Any]:
        return kernel.attend(rows, pool, rules=attention.rules, sinks=attention.sinks is not None)

    def holds_latents(self, cache: tuple[Pool, jax.Array]) -> bool:
        """Return True if the pages hold latents."""
        return has_latents(cache[0])

    def attend_latents(
        self,
        q_rckqh: jax.Array,
        latent_rcw: jax.Array,
        cache: tuple[Pool, jax.Array],
        attention: AttentionParams,
        expand: Expand,
    ) -> tuple[jax.Array, tuple[Pool, jax.Array]]:
        """Return `attend` where the pool holds latents, of which `expand` makes keys and values."""
        pool, layer = cache
        table = self.page_table + layer * self.pages
        if self.kernel is not None:
            assert isinstance(expand, RankSpace), "the kernel caches the keys of all heads for latent attention"
            factors = expand.kernel_factors()
            k, v = jnp.split(latent_rcw, [factors.k_lkh.shape[0]], axis=-1)
            rows = RankRows(q_rckqh, k, v, table, self.starts, self.counts)
            options: dict[str, Any] = {"rules": attention.rules, "sinks": attention.sinks is not None}
            mixed, latents = self.kernel.attend_rank_space(rows, pool["latent"], factors, **options)
            return mixed, ({"latent": latents}, layer)
        pool = write_latents(pool, latent_rcw, *token_places(pool, table, self.positions, self.live))

        def read(pages: jax.Array, lengths: jax.Array, first: jax.Array | int) -> Window:
            return read_expanded(pool, pages, lengths, expand, first)

        return self._by_xla(q_rckqh, table, page_size_of(pool), read, attention), (pool, layer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowContext:
    """Whole sequences in rows from position 0, without a cache, summed in the order of the cached contexts: scoring.

    By the kernel of packed rows, which stores no scores, on TPUs, where the cached contexts have a kernel of their own,
    and wherever else there is one: on GPUs, in bfloat16. With exact numerics (kernels/exact) one kernel serves both.
    """

    positions: jax.Array  # int32 [r, c], 0 to c - 1 in each row
    # Bool [r, c], False at padding behind a sequence, which no token of it sees; None: that is not known
    live: Any = None

    def attend(
        self, q_rckqh: jax.Array, k_rckh: jax.Array, v_rckh: jax.Array, cache: None, attention: AttentionParams
    ) -> tuple[jax.Array, None]:
        """Return causal attention within rows; there is no cache."""
        require_complete_rows(self)
        if (kernels := exact_kernels()) is not None:
            from axlearn_like.kernels.exact.attention import exact_row_attention  # Pallas: slow to import

            options: dict[str, Any] = {"sinks": attention.sinks is not None, "interpret": kernels.interpret}
            return exact_row_attention(q_rckqh, k_rckh, v_rckh, rules=attention.rules, **options), cache
        if platform() == "tpu" or not stores_scores(q_rckqh, v_rckh, attention):
            return attend(q_rckqh, k_rckh, v_rckh, attention, segment_ids=jnp.zeros_like(self.positions)), cache
        padding = -k_rckh.shape[1] % KEY_BLOCK
        k = jnp.pad(k_rckh.transpose(0, 2, 3, 1), [(0, 0)] * 3 + [(0, padding)])
        v = jnp.pad(v_rckh.transpose(0, 2, 1, 3), [(0, 0)] * 2 + [(0, padding), (0, 0)])
        return attend_window(q_rckqh, {"k": k, "v": v}, self.positions, attention), cache


def write_tokens(
    pool: Pool,
    k_rckh: jax.Array | Rounded,
    v_rckh: jax.Array | Rounded,
    table: jax.Array,
    positions: jax.Array,
    live: jax.Array,
) -> Pool:
    """Return the pool with the keys and values of live tokens in their pages; in place where the pool is donated."""
    return write_places(pool, k_rckh, v_rckh, *token_places(pool, table, positions, live))


def write_places(
    pool: Pool, k_rckh: jax.Array | Rounded, v_rckh: jax.Array | Rounded, page: jax.Array, slot: jax.Array
) -> Pool:
    """Return the pool with keys and values at these pages and slots, int32 [r, c], as `write_tokens` does."""
    if is_int8(pool):
        k, v = (x if isinstance(x, Rounded) else round_heads(x) for x in (k_rckh, v_rckh))
        return write_rounded(pool, k, v, page, slot)
    assert not isinstance(k_rckh, Rounded) and not isinstance(v_rckh, Rounded), "the pool holds no scales"
    k, v = (constrain(x.astype(pool["k"].dtype), None, None, "heads", None) for x in (k_rckh, v_rckh))
    return {"k": pool["k"].at[page, :, :, slot].set(k), "v": pool["v"].at[page, :, slot].set(v)}


def token_places(pool: Pool, table: jax.Array, positions: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return page and slot of each token, int32 as the positions; padding goes to the null page."""
    page_size = page_size_of(pool)
    page = jnp.take_along_axis(table, positions // page_size, axis=1, mode="clip")
    return jnp.where(live, page, NULL_PAGE), positions % page_size


def read_window(pool: Pool, table: jax.Array, lengths: jax.Array, dtype: DTypeLike) -> Window:
    """Return the pages of each row, side by side, in `dtype` if they hold int8. Values behind `lengths` [r] are zero.

    What is there was left by the previous owner of the page. It has no weight, but 0 x NaN is NaN.
    """
    rows, width = table.shape
    _, heads, head_dim, page_size = pool["k"].shape
    sharding = partition(None, "heads", None, None)
    k, v = read_pages(pool, table, dtype)
    k, v = k.transpose(0, 2, 3, 1, 4), v.transpose(0, 2, 1, 3, 4)
    v = jnp.reshape(v, (rows, heads, width * page_size, head_dim), out_sharding=sharding)
    written = jnp.arange(width * page_size) < lengths[:, None]
    return {
        "k": jnp.reshape(k, (rows, heads, head_dim, width * page_size), out_sharding=sharding),
        "v": jnp.where(written[:, None, :, None], v, 0),
    }


def attend_window(q_rckqh: jax.Array, window: Window, positions: jax.Array, attention: AttentionParams) -> jax.Array:
    """Return attention of each row's queries over its window, keys up to their own position; [r, c, k, q, h]."""
    blocks = key_blocks(window["v"].shape[2], q_rckqh.shape[-1])
    keys, values = [window["k"][..., block] for block in blocks], [window["v"][:, :, block] for block in blocks]
    return attend_blocks(q_rckqh, keys, values, positions, attention)
