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
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.cascade import keys_and_values
from axlearn_like.kernels.paged_attention.pages import write_pages
from axlearn_like.kernels.paged_attention.rows import PagedRows, check_rules, check_table, on_own_heads, widen
from axlearn_like.kernels.paged_attention.simulation import simulated
from axlearn_like.kernels.paged_attention.softmax_blocks import (
    BlockSoftmax,
    for_each_block,
    in_eights,
    page_copies,
    scores,
    visible_keys,
)
from mesh.cost.expected import costs
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
    count, chunk, heads, per_head, head_dim = q_rckqh.shape
    tokens = max(1, QUERIES // per_head)
    parts = -(-chunk // tokens)
    q = jnp.pad(q_rckqh, [(0, 0), (0, parts * tokens - chunk)] + [(0, 0)] * 3)
    q = widen(q).reshape(count * parts, tokens, heads, per_head, -1).transpose(0, 2, 1, 3, 4)
    before = jnp.arange(parts) * tokens
    ends = jnp.where(counts_r[:, None] > before, starts_r[:, None] + jnp.minimum(before + tokens, counts_r[:, None]), 0)
    mixed = _attend_items(
        in_eights(q.reshape(count * parts, heads, tokens * per_head, -1)),
        pool,
        page_table_rw,
        jnp.repeat(jnp.arange(count), parts),
        (starts_r[:, None] + before).reshape(-1),
        ends.reshape(-1),
        per_head=per_head,
        rules=rules,
        scale=rules.scale_of(head_dim),
        interpret=interpret,
    )[:, :, : tokens * per_head]
    mixed = mixed.reshape(count, parts, heads, tokens, per_head, -1).transpose(0, 1, 3, 2, 4, 5)
    return mixed.reshape(count, parts * tokens, heads, per_head, -1)[:, :chunk, ..., :head_dim]


def _attend_items(
    q_iknh: jax.Array,
    pool: jax.Array,
    page_table_rw: jax.Array,
    rows_i: jax.Array,
    firsts_i: jax.Array,
    ends_i: jax.Array,
    *,
    per_head: int,
    rules: ScoreRules,
    scale: float,
    interpret: bool,
) -> jax.Array:
    """Return attention of each item's queries to the keys of its row up to their own positions, [i, k, n, h].

    `rows_i`, `firsts_i`, `ends_i`: int32, an item's row, the position of its first token, and behind its last; 0: none
    is live.
    """
    items, heads, queries, width = q_iknh.shape
    page_size, longest = pool.shape[1], page_table_rw.shape[1] * pool.shape[1]
    block = max(1, KEYS // page_size)
    body = functools.partial(
        _kernel,
        per_head=per_head,
        scale=scale,
        soft_cap=rules.soft_cap,
        window=rules.window,
        block=block,
    )
    of_item = pl.BlockSpec((None, heads, queries, width), lambda i, *_: (i, 0, 0, 0))
    keys = items * min(longest, rules.window or longest)
    work = {"flops": 4 * queries * keys * heads * width, "bytes": 2 * keys * heads * width * pool.dtype.itemsize}
    with simulated(interpret), costs(**work):
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                grid=(items,),
                in_specs=[of_item, pl.BlockSpec(memory_space=pl.ANY)],
                out_specs=of_item,
                scratch_shapes=[
                    pltpu.VMEM((2, block * page_size, 2 * heads, width), pool.dtype),
                    *BlockSoftmax.scratch(heads, queries, width),
                    pltpu.SemaphoreType.DMA((2,)),
                ],
            ),
            out_shape=jax.ShapeDtypeStruct(q_iknh.shape, q_iknh.dtype),
            name="exact_attention",
        )(*(x.astype(jnp.int32) for x in (page_table_rw, rows_i, firsts_i, ends_i)), q_iknh, pool)


def _kernel(
    table_rw: Any,
    rows_i: Any,
    firsts_i: Any,
    ends_i: Any,
    q_knh: Any,
    pool: Any,
    mixed_knh: Any,
    buffer: Any,
    *scratch: Any,
    per_head: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    block: int,
) -> None:
    """Attend to the keys of one item."""
    item, page_size = pl.program_id(0), pool.shape[1]
    row, first, end = rows_i[item], firsts_i[item], ends_i[item]
    # Blocks begin at multiples of their size, with a window too: what a token adds up does not depend on its item.
    keys_of_block = block * page_size
    begin = 0 if window is None else jnp.maximum(first - window + 1, 0) // keys_of_block * keys_of_block
    softmax, arrived = BlockSoftmax(*scratch[:3]), scratch[3]
    softmax.clear()

    def attend(slot: jax.Array, position: jax.Array) -> None:
        shape = (q_knh.shape[1], keys_of_block)
        visible = visible_keys(shape, position, first, end, per_head, window)
        for head in range(q_knh.shape[0]):
            k, v = keys_and_values(buffer, slot, head)
            softmax.add(head, scores(q_knh[head], k, scale, soft_cap, visible), v)

    sizes = {"page_size": page_size, "block": block}
    for_each_block(
        lambda index: table_rw[row, index],
        (begin, end),
        **sizes,
        copies=page_copies(pool, buffer, arrived),
        attend=attend,
    )
    mixed_knh[...] = softmax.mixed().astype(mixed_knh.dtype)
