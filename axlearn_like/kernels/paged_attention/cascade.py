"""Decoding on TPUs over pages that rows have in common: a kernel that attends to a part of the keys, and a merge.

JAX's ragged paged attention reads all pages of each row and does not return the logarithm of its sum of exponentials,
without which parts cannot be merged. This kernel of ours does both passes of cascade attention (Hydragen, Juravsky et
al. 2024, arXiv 2402.05099): the queries of all rows of a tile against the pages that they share, read once, and each
row's queries against its own. New keys and values are written first.

A step of the kernel is an item, a tile or a row; its keys come in blocks of pages (softmax_blocks.py).

Shape letters: i items, n queries of an item and key/value head, t tiles, p pages of an item; others as in rows.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.items import ItemCall, ItemPlan, run_items
from axlearn_like.kernels.paged_attention.pages import write_pages
from axlearn_like.kernels.paged_attention.rows import (
    DEFAULT,
    LANES,
    BlockSizes,
    PagedRows,
    SharedTiles,
    check_table,
    on_own_heads,
    widen,
)
from axlearn_like.kernels.paged_attention.softmax_blocks import (
    BlockSoftmax,
    block_buffer,
    for_each_block,
    in_eights,
    keys_and_values,
    page_copies,
    scores,
)
from mesh.cost.expected import KernelCost


def cascade_attention(
    rows: PagedRows,
    pool: jax.Array,
    tiles: SharedTiles,
    *,
    rules: ScoreRules,
    sizes: BlockSizes = DEFAULT,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Write the new key and value of each row into its pages, then attend to all; keys in common are read once a tile.

    Args:
        rows: one new token of each row, none in idle ones.
        pool: from `pages.make_pool`.
        rules: causal, without a window.
        sizes: sizes of blocks, of which `shared_keys` counts.

    Returns:
        The mixed values [r, 1, k, q, h], zero in idle rows, and the pool.
    """
    check_table(rows, pool.shape[1])
    body = functools.partial(_on_one_device, rules=rules, sizes=sizes, interpret=interpret)
    return on_own_heads(body, rows, pool, tiles)


def _on_one_device(
    rows: PagedRows, pool: jax.Array, tiles: SharedTiles, *, rules: ScoreRules, sizes: BlockSizes, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    count, _, heads, per_head, head_dim = rows.q_rckqh.shape
    pool = write_pages(pool, rows, interpret)
    limits = {"scale": rules.scale_of(head_dim), "sizes": sizes, "interpret": interpret}
    attend = functools.partial(_attend_pages, rules=rules, **limits)
    q_rkqh = widen(rows.q_rckqh[:, 0]).astype(pool.dtype)
    shared_t, tile, number = tiles.shared_t, tiles.rows, len(tiles.shared_t)
    q_tknh = jnp.pad(q_rkqh, [(0, number * tile - count)] + [(0, 0)] * 3).reshape(number, tile, heads, per_head, -1)
    q_tknh = q_tknh.transpose(0, 2, 1, 3, 4).reshape(number, heads, tile * per_head, -1)

    def to_rows(x_tknh: jax.Array) -> jax.Array:
        x = x_tknh[:, :, : tile * per_head].reshape(number, heads, tile, per_head, -1)
        return x.transpose(0, 2, 1, 3, 4).reshape(number * tile, heads, per_head, -1)[:count]

    table, live = rows.page_table_rw, rows.counts_r > 0
    common = attend(in_eights(q_tknh), pool, table[tiles.sources_t], (jnp.zeros_like(shared_t), shared_t))
    begins = jnp.repeat(shared_t, tile)[:count]
    own = attend(in_eights(q_rkqh), pool, table, (begins, jnp.where(live, rows.starts_r + 1, 0)))
    parts = [(to_rows(common[0]), to_rows(common[1])), (own[0][:, :, :per_head], own[1][:, :, :per_head])]
    mixed = rows.zero_padding(merge(parts)[:, None])
    return mixed[..., :head_dim].astype(rows.q_rckqh.dtype), pool


def _attend_pages(
    q_iknh: jax.Array,
    pool: jax.Array,
    page_table_ip: jax.Array,
    keys_i: tuple[jax.Array, jax.Array],
    *,
    rules: ScoreRules,
    scale: float,
    sizes: BlockSizes,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return attention of each item's queries to its keys, which all of them see.

    `keys_i`: int32, positions of an item's first key, a multiple of the page size, and behind its last one. One without
    keys has zeros, and the logarithm of zero. Mixed values are float32 [i, k, n, h], log-sum-exps float32 [i, k, n,
    128], all lanes the same.
    """
    items, heads, queries, width = q_iknh.shape
    page_size, pages = pool.shape[1], page_table_ip.shape[1]
    block = min(pages, max(1, sizes.shared_keys // page_size))
    reads = items * pages * page_size * 2 * heads * width
    work = KernelCost(2 * queries * reads, reads * pool.dtype.itemsize)
    return run_items(
        functools.partial(_kernel, ItemPlan(rules, scale, block)),
        (page_table_ip, *keys_i),
        q_iknh,
        [(pool, block_buffer(pool, block * page_size))],
        [jax.ShapeDtypeStruct((items, heads, queries, lanes), jnp.float32) for lanes in (width, LANES)],
        ItemCall("attend_pages", work, sizes.vmem_bytes, interpret),
    )


def merge(parts: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Return attention over all keys from parts of them: mixed values [..., h] and log-sum-exps [..., 128]."""
    total = functools.reduce(jnp.logaddexp, [sums[..., :1] for _, sums in parts])
    # A part without keys has no weight; a row without any has the sum MASKED, and zeros.
    return sum((mixed * jnp.exp(sums[..., :1] - total) for mixed, sums in parts), start=jnp.zeros(()))


def _kernel(plan: ItemPlan, *refs: Any) -> None:
    table_ip, begins_i, ends_i, q_knh, pool, mixed_knh, sums_knl, buffer, *state, arrived = refs
    item, page_size = pl.program_id(0), pool.shape[1]
    begin, end = begins_i[item], ends_i[item]
    softmax = BlockSoftmax(*state)
    softmax.clear()

    def attend(slot: jax.Array, position: jax.Array) -> None:
        visible = position + jax.lax.broadcasted_iota(jnp.int32, (1, plan.block * page_size), 1) < end
        for head in range(q_knh.shape[0]):
            k, v = keys_and_values(buffer, slot, head)
            softmax.add(head, scores(q_knh[head], k, plan.scale, plan.rules.soft_cap, visible), v)

    for_each_block(
        lambda index: table_ip[item, index],
        (begin, end),
        page_size=page_size,
        block=plan.block,
        copies=page_copies(pool, buffer, arrived),
        attend=attend,
    )
    mixed_knh[...], sums_knl[...] = softmax.mixed(), softmax.log_sums()
