"""Causal attention in fixed blocks: of rows on pages, for sampling, and of whole rows, for scoring, by one kernel.

A step of the kernel is an item: a few tokens of one row, whose queries meet its keys from position 0 on, `KEYS` at a
time in ascending order (softmax_blocks.py). An item has as many queries wherever it comes from, a dispatch of single
tokens, a chunk of a prompt or a whole row, and reads the keys of its own row alone. Blocks behind a token's position
add zeros to it. So a token's bits depend on its sequence alone.

The price: a single token takes the place of an item's, and the keys of a long chunk are read once for each item.

Shape letters: i items, n queries of an item and key/value head; b, t rows and tokens; others as in paged_attention.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.items import ItemCall, ItemPlan, attend_in_items, run_items
from axlearn_like.kernels.paged_attention.pages import write_pages
from axlearn_like.kernels.paged_attention.rows import PagedRows, check_rules, check_table, on_own_heads, widen
from axlearn_like.kernels.paged_attention.softmax_blocks import (
    BlockSoftmax,
    block_buffer,
    for_each_block,
    keys_and_values,
    page_copies,
    scores,
    visible_keys,
)
from mesh.cost.expected import KernelCost
from mesh.rules import partition

KEYS = 512  # keys of a block
QUERIES = 32  # queries of an item, over all heads that share a key/value head
PAGE = 64  # tokens of a page, where rows have none of their own


def exact_paged_attention(
    rows: PagedRows, pool: jax.Array, *, rules: ScoreRules, sinks: bool = False, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Write the new keys and values of each row into its pages, then attend.

    Args, results and errors are those of `ragged_attention`, whose block sizes have no effect here.
    """
    check_rules(rules, sinks)
    check_table(rows, pool.shape[1])
    return on_own_heads(functools.partial(_paged, rules=rules, interpret=interpret), rows, pool)


def _paged(rows: PagedRows, pool: jax.Array, *, rules: ScoreRules, interpret: bool) -> tuple[jax.Array, jax.Array]:
    pool = write_pages(pool, rows, interpret)
    q = rows.q_rckqh.astype(pool.dtype)
    mixed = _attend(q, pool, rows.page_table_rw, rows.starts_r, rows.counts_r, rules=rules, interpret=interpret)
    return rows.zero_padding(mixed.astype(rows.q_rckqh.dtype)), pool


def exact_row_attention(
    q_btkqh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    *,
    rules: ScoreRules,
    sinks: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Return attention within whole rows from position 0, [b, t, k, q, h], as `exact_paged_attention` gives it.

    Values narrower than keys (latent attention) are padded with zeros, as pages hold them.
    """
    check_rules(rules, sinks)
    v_btkh = jnp.pad(v_btkh, [(0, 0)] * 3 + [(0, k_btkh.shape[-1] - v_btkh.shape[-1])])
    body = functools.partial(_own_rows, rules=rules, interpret=interpret)
    arrays = (q_btkqh, k_btkh, v_btkh)
    specs: Any = tuple(partition("batch", None, "heads", *[None] * (x.ndim - 3)) for x in arrays)
    if specs[0] is None:
        return body(*arrays)
    arrays = jax.sharding.reshard(arrays, specs)
    return jax.shard_map(body, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)


def _own_rows(q: jax.Array, k: jax.Array, v: jax.Array, *, rules: ScoreRules, interpret: bool) -> jax.Array:
    rows, length, heads, _ = k.shape
    pages = -(-length // PAGE)
    lines = widen(jnp.stack([k, v], axis=3).reshape(rows, length, 2 * heads, -1))
    pool = jnp.pad(lines, [(0, 0), (0, pages * PAGE - length), (0, 0), (0, 0)])
    pool = pool.reshape(rows * pages, PAGE, 2 * heads, -1)
    table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    starts, counts = jnp.zeros(rows, jnp.int32), jnp.full(rows, length, jnp.int32)
    check_table(PagedRows(q, k, v, table, starts, counts), PAGE)
    return _attend(q, pool, table, starts, counts, rules=rules, interpret=interpret)


def _attend(
    q_rckqh: jax.Array,
    pool: jax.Array,
    page_table_rw: jax.Array,
    starts_r: jax.Array,
    counts_r: jax.Array,
    *,
    rules: ScoreRules,
    interpret: bool,
) -> jax.Array:
    """Return attention of each row's tokens to its pages, cut into items; [r, c, k, q, h]."""
    count, _, _, per_head, head_dim = q_rckqh.shape
    page_size, longest = pool.shape[1], page_table_rw.shape[1] * pool.shape[1]
    plan = ItemPlan(rules, rules.scale_of(head_dim), max(1, KEYS // page_size), per_head)

    def attend(q_iknh: jax.Array, firsts_i: jax.Array, ends_i: jax.Array) -> jax.Array:
        items, heads, queries, width = q_iknh.shape
        keys = items * min(longest, rules.window or longest)
        work = KernelCost(4 * queries * keys * heads * width, 2 * keys * heads * width * pool.dtype.itemsize)
        rows_i = jnp.repeat(jnp.arange(count), items // count)
        return run_items(
            functools.partial(_kernel, plan),
            (page_table_rw, rows_i, firsts_i, ends_i),
            q_iknh,
            [(pool, block_buffer(pool, plan.block * page_size))],
            jax.ShapeDtypeStruct(q_iknh.shape, q_iknh.dtype),
            ItemCall("exact_attention", work, interpret=interpret),
        )

    return attend_in_items(attend, q_rckqh, starts_r, counts_r, QUERIES)


def _kernel(plan: ItemPlan, *refs: Any) -> None:
    table_rw, rows_i, firsts_i, ends_i, q_knh, pool, mixed_knh, buffer, *state, arrived = refs
    item, page_size, window = pl.program_id(0), pool.shape[1], plan.rules.window
    row, first, end = rows_i[item], firsts_i[item], ends_i[item]
    # Blocks begin at multiples of their size, with a window too: what a token adds up does not depend on its item.
    keys_of_block = plan.block * page_size
    begin = 0 if window is None else jnp.maximum(first - window + 1, 0) // keys_of_block * keys_of_block
    softmax = BlockSoftmax(*state)
    softmax.clear()

    def attend(slot: jax.Array, position: jax.Array) -> None:
        shape = (q_knh.shape[1], keys_of_block)
        visible = visible_keys(shape, position, first, end, plan.per_head, window)
        for head in range(q_knh.shape[0]):
            k, v = keys_and_values(buffer, slot, head)
            softmax.add(head, scores(q_knh[head], k, plan.scale, plan.rules.soft_cap, visible), v)

    for_each_block(
        lambda index: table_rw[row, index],
        (begin, end),
        page_size=page_size,
        block=plan.block,
        copies=page_copies(pool, buffer, arrived),
        attend=attend,
    )
    mixed_knh[...] = softmax.mixed().astype(mixed_knh.dtype)
