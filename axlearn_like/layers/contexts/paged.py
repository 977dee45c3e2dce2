"""Contexts with a paged KV cache: prefill and decoding.

The keys and values of all layers are stored in one pool of pages; a page holds `page_size` tokens of one layer, and
layer l's page p is row `l * pages + p` of the pool. A sequence owns a list of pages (its row of the page table), so
memory follows the tokens that exist, and sequences with a common beginning can share pages.

* `PagedContext`: reads and writes the pool at every call. Prefill everywhere, decoding on accelerators.
* `RowContext`: whole sequences without a cache, in the same order: scoring.
* `WindowContext` (window.py): decoding by XLA, several steps on copies of the pages.

All reduce in the same order: keys ascending by position, from the first token of the sequence, in blocks that begin at
fixed positions (`key_blocks`). Padding at the end adds exact zeros, so a token's output does not depend on chunk,
window or batch (see `attend_blocks`).

Shape letters: r rows (one sequence each), c tokens of a row's chunk, w pages of a row, s keys of a window;
k, q, h as in attention/grouped_query.py.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.dispatch import AttentionParams, attend, platform, stores_scores
from axlearn_like.kernels.attention.interface import MASKED
from axlearn_like.kernels.attention.xla import batched_dot, capped
from axlearn_like.kernels.deterministic import key_exponentials, no_fuse
from axlearn_like.layers.contexts.latents import Expand, has_latents, page_size_of, read_expanded, write_latents
from axlearn_like.layers.contexts.packed import require_complete_rows
from axlearn_like.layers.linear import UNSPLIT_SUM
from mesh.errors import UserError
from mesh.rules import constrain, partition

Pool = Any  # dict of arrays k, v (see `make_pool`) or latent (latents.py), or the TPU kernel's array
Window = dict[str, jax.Array]  # k [r, k, h, s], v [r, k, s, h]

KEY_BLOCK = 64  # windows are multiples of this many keys, so that XLA's CPU reductions run over whole vectors
NULL_PAGE = 0  # the page that padding is written to; no sequence owns it


def make_pool(*, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: Any) -> Pool:
    """Return an empty pool: k [layers * pages, k, h, page_size], v [layers * pages, k, page_size, h]."""

    def empty(*shape: int) -> jax.Array:
        return constrain(jnp.zeros((layers * pages, kv_heads, *shape), dtype), None, "heads", None, None)

    return {"k": empty(head_dim, page_size), "v": empty(page_size, head_dim)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedContext:
    """A chunk of tokens of each row, after what the row has in the pool; the layer's cache is (pool, layer index).

    Attributes:
        page_table: int32 [r, w].
        starts: int32 [r], tokens of the row already in the pool.
        counts: int32 [r], live tokens of the chunk; the rest is padding.
        chunk: c.
        pages: of one layer.
        kernel: the TPU kernel is used; the pool then has its layout.
    """

    decodes: ClassVar[bool] = False

    page_table: jax.Array
    starts: jax.Array
    counts: jax.Array
    chunk: int = dataclasses.field(metadata={"static": True})
    pages: int = dataclasses.field(metadata={"static": True})
    kernel: bool = dataclasses.field(default=False, metadata={"static": True})

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
        if self.kernel:
            from axlearn_like.kernels.ragged_paged_attention import paged_attention_tpu  # Pallas, for TPUs alone

            mixed, pool = paged_attention_tpu(
                *(q_rckqh, k_rckh, v_rckh, pool),
                page_table_rw=table,
                starts_r=self.starts,
                counts_r=self.counts,
                rules=attention.rules,
                sinks=attention.sinks is not None,
            )
            return mixed, (pool, layer)
        pool = write_tokens(pool, k_rckh, v_rckh, table, self.positions, self.live)
        window = read_window(pool, table, self.starts + self.counts)
        return attend_window(q_rckqh, window, self.positions, attention), (pool, layer)

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
        pool = write_latents(pool, latent_rcw, *token_places(pool, table, self.positions, self.live))
        window = read_expanded(pool, table, self.starts + self.counts, expand)
        return attend_window(q_rckqh, window, self.positions, attention), (pool, layer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowContext:
    """Whole sequences in rows from position 0, without a cache, summed in the order of the cached contexts: scoring.

    By the kernel of packed rows, which stores no scores, on TPUs, where the cached contexts have a kernel of their own,
    and wherever else there is one: on GPUs, in bfloat16.

    Attributes:
        positions: int32 [r, c], 0 to c - 1 in each row.
        live: bool [r, c], False at padding behind a sequence, which no token of it sees; None: that is not known.
    """

    positions: jax.Array
    live: Any = None

    def attend(
        self, q_rckqh: jax.Array, k_rckh: jax.Array, v_rckh: jax.Array, cache: None, attention: AttentionParams
    ) -> tuple[jax.Array, None]:
        """Return causal attention within rows; there is no cache."""
        require_complete_rows(self)
        if platform() == "tpu" or not stores_scores(q_rckqh, v_rckh, attention):
            return attend(q_rckqh, k_rckh, v_rckh, attention, segment_ids=jnp.zeros_like(self.positions)), cache
        padding = -k_rckh.shape[1] % KEY_BLOCK
        k = jnp.pad(k_rckh.transpose(0, 2, 3, 1), [(0, 0)] * 3 + [(0, padding)])
        v = jnp.pad(v_rckh.transpose(0, 2, 1, 3), [(0, 0)] * 2 + [(0, padding), (0, 0)])
        return attend_window(q_rckqh, {"k": k, "v": v}, self.positions, attention), cache


def write_tokens(
    pool: Pool, k_rckh: jax.Array, v_rckh: jax.Array, table: jax.Array, positions: jax.Array, live: jax.Array
) -> Pool:
    """Return the pool with the keys and values of live tokens in their pages; in place where the pool is donated."""
    page, slot = token_places(pool, table, positions, live)
    k, v = (constrain(x.astype(pool["k"].dtype), None, None, "heads", None) for x in (k_rckh, v_rckh))
    return {"k": pool["k"].at[page, :, :, slot].set(k), "v": pool["v"].at[page, :, slot].set(v)}


def token_places(pool: Pool, table: jax.Array, positions: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return page and slot of each token, int32 as the positions; padding goes to the null page."""
    page_size = page_size_of(pool)
    page = jnp.take_along_axis(table, positions // page_size, axis=1, mode="clip")
    return jnp.where(live, page, NULL_PAGE), positions % page_size


def read_window(pool: Pool, table: jax.Array, lengths: jax.Array) -> Window:
    """Return the pages of each row, side by side. Values behind `lengths` [r] are zero.

    What is there was left by the previous owner of the page. It has no weight, but 0 x NaN is NaN.
    """
    rows, width = table.shape
    _, heads, head_dim, page_size = pool["k"].shape
    sharding = partition(None, "heads", None, None)
    k = pool["k"][table].transpose(0, 2, 3, 1, 4)
    v = pool["v"][table].transpose(0, 2, 1, 3, 4)
    v = jnp.reshape(v, (rows, heads, width * page_size, head_dim), out_sharding=sharding)
    written = jnp.arange(width * page_size) < lengths[:, None]
    return {
        "k": jnp.reshape(k, (rows, heads, head_dim, width * page_size), out_sharding=sharding),
        "v": jnp.where(written[:, None, :, None], v, 0),
    }


def key_blocks(size: int, head_dim: int) -> list[slice]:
    """Return the blocks of a window of `size` keys: up to key 64, 128, 256, 384, 512, 768, 1024, 1536, ...

    They begin at fixed positions, whatever the window, so that sums over keys are taken in one order; small ones come
    first, so that short rows read little; none is so wide that XLA's CPU matmul splits a sum over it (see
    `linear._matmul`).
    """
    widest = max(1, UNSPLIT_SUM // max(head_dim, KEY_BLOCK) // KEY_BLOCK) * KEY_BLOCK
    ends = [0, KEY_BLOCK]
    while ends[-1] < size:
        power = 1 << (ends[-1].bit_length() - 1)
        ends.append(ends[-1] + min(widest, max(KEY_BLOCK, power // 2 if power > 2 * KEY_BLOCK else power)))
    return [slice(start, min(end, size)) for start, end in itertools.pairwise(ends)]


def attend_window(q_rckqh: jax.Array, window: Window, positions: jax.Array, attention: AttentionParams) -> jax.Array:
    """Return attention of each row's queries over its window, keys up to their own position; [r, c, k, q, h]."""
    blocks = key_blocks(window["v"].shape[2], q_rckqh.shape[-1])
    keys, values = [window["k"][..., block] for block in blocks], [window["v"][:, :, block] for block in blocks]
    return attend_blocks(q_rckqh, keys, values, positions, attention)


def attend_blocks(
    q_rckqh: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    positions: jax.Array,
    attention: AttentionParams,
) -> jax.Array:
    """Return attention of each row's queries over blocks of keys, up to the query's own position; [r, c, k, q, h].

    The softmax is divided at the end, as in all blockwise kernels.

    Args:
        q_rckqh: queries.
        keys: by block (see `key_blocks`), [r, k, h, s], or split further: [r, k, s / 64, h, 64].
        values: by block, [r, k, s, h].
        positions: int32 [r, c], of the queries.
        attention: rules and sinks; its kernel is not used here.

    Raises:
        UserError: attention is not causal: a query would see keys that do not exist yet.
    """
    rules = attention.rules
    if not rules.causal:
        raise UserError("Attention.causal=False is not supported with a cache; expected causal attention")
    rows, length, heads, per_head, width = q_rckqh.shape
    sharding = ("batch", "heads", None, None)
    q = constrain(q_rckqh, "batch", None, "heads", None, None).transpose(0, 2, 1, 3, 4) * rules.scale_of(width)
    q = jnp.reshape(q, (rows, heads, length * per_head, width), out_sharding=partition(*sharding))
    scores = [_scores(q, constrain(k, *sharding, *[None] * (k.ndim - 4))) for k in keys]
    scores = jnp.concatenate(scores, axis=-1) if len(scores) > 1 else scores[0]
    last = jnp.repeat(constrain(positions, "batch", None), per_head, axis=1)
    places = jnp.arange(scores.shape[-1])
    visible = places <= last[..., None]
    if rules.window is not None:
        visible &= places > last[..., None] - rules.window
    scores = jnp.where(visible[:, None], capped(scores, rules), MASKED)
    weights, total = key_exponentials(scores)
    if attention.sinks is not None:  # one more key, whose value is zero
        sinks = attention.sinks.astype(jnp.float32)[:, None] + jnp.zeros((length, 1))
        sinks = jnp.reshape(sinks, (heads, -1), out_sharding=partition("heads", None))
        total += jnp.exp(sinks[:, :, None] - no_fuse(jnp.max(scores, axis=-1, keepdims=True)))
    weights = weights.astype(values[0].dtype)
    parts = [weights[..., block] for block in key_blocks(scores.shape[-1], width)]
    mixed = sum(_weighted_sum(part, constrain(v, *sharding)) for part, v in zip(parts, values, strict=True)) / total
    split = partition("batch", "heads", None, None, None)
    shape = (rows, heads, length, per_head, values[0].shape[-1])
    mixed = jnp.reshape(mixed.astype(q_rckqh.dtype), shape, out_sharding=split)
    return mixed.transpose(0, 2, 1, 3, 4)


def _scores(q_rknh: jax.Array, keys: jax.Array) -> jax.Array:
    """float32 [r, k, n, s]."""
    if keys.ndim == 4:
        return batched_dot(q_rknh, keys)
    rows, heads, count, _ = q_rknh.shape
    blocks = keys.shape[2]
    q = jnp.broadcast_to(q_rknh[:, :, None], (rows, heads, blocks, *q_rknh.shape[2:]))
    scores = batched_dot(constrain(q, "batch", "heads", None, None, None), keys).transpose(0, 1, 3, 2, 4)
    return jnp.reshape(scores, (rows, heads, count, -1), out_sharding=partition("batch", "heads", None, None))


def _weighted_sum(weights_rkns: jax.Array, v_rksh: jax.Array) -> jax.Array:
    """Return weights x values over s, float32 [r, k, n, h].

    XLA's CPU matmul sums a result whose columns are not a multiple of 64 in another order if there are many rows, so it
    is widened: prefill and decoding stay equal to the bit.
    """
    width = v_rksh.shape[-1]
    if width % 64 and (weights_rkns.shape[2] > 48 or width % 32):
        v_rksh = jnp.pad(v_rksh, [(0, 0)] * 3 + [(0, -width % 64)])
    return batched_dot(weights_rkns, v_rksh)[..., :width]
