"""Paged attention on TPU over keys and values of eight bits, by a kernel of ours.

JAX's ragged paged attention takes pages of int8 with one scale for all of them, fixed when it is compiled; newer ones
refuse them. Here each token and head has its own (int8_scales.py). Numbers are multiplied as they are, exact in
bfloat16; scales go to the scores and to the weights of the softmax, both of which have keys along a register's lanes.

A step of the kernel is an item, some queries of one row; its keys come in blocks of pages (softmax_blocks.py).

Shape letters: i items, n queries of an item and key/value head; others as in rows.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.block_sizes import DEFAULT, BlockSizes
from axlearn_like.kernels.paged_attention.int8_scales import Int8Pool, write_int8_pages
from axlearn_like.kernels.paged_attention.rows import PLAIN, PagedRows, check_rules, check_table, on_own_heads, widen
from axlearn_like.kernels.paged_attention.simulation import simulated
from axlearn_like.kernels.paged_attention.softmax_blocks import (
    BlockSoftmax,
    for_each_block,
    in_eights,
    scores,
    visible_keys,
)
from mesh.cost.expected import costs

QUERIES = 128  # queries of an item, over all heads that share a key/value head


def int8_attention(
    rows: PagedRows,
    pool: Int8Pool,
    *,
    rules: ScoreRules = PLAIN,
    sinks: bool = False,
    sizes: BlockSizes = DEFAULT,
    queries_per_item: int = QUERIES,
    interpret: bool = False,
) -> tuple[jax.Array, Int8Pool]:
    """Round new keys and values and write them, then attend to all pages, up to and including each token.

    Args, results and errors are those of `ragged_attention`; `pool` is one of `make_int8_kernel_pool`, of `sizes` keys
    count, and `queries_per_item` are the most queries of a row and head that read its keys together.
    """
    check_rules(rules, sinks)
    check_table(rows, pool["numbers"].shape[1])
    keys = sizes.row_keys if rows.q_rckqh.shape[1] == 1 else sizes.chunk_keys
    blocks: dict[str, Any] = {"keys_per_block": keys, "queries_per_item": queries_per_item}
    blocks |= {"vmem_bytes": sizes.vmem_bytes}
    return on_own_heads(functools.partial(_on_one_device, rules=rules, interpret=interpret, **blocks), rows, pool)


def _on_one_device(
    rows: PagedRows,
    pool: Int8Pool,
    *,
    rules: ScoreRules,
    keys_per_block: int,
    vmem_bytes: int | None,
    queries_per_item: int,
    interpret: bool,
) -> tuple[jax.Array, Int8Pool]:
    pool = write_int8_pages(pool, rows, interpret)
    count, chunk, heads, per_head, head_dim = rows.q_rckqh.shape
    tokens = min(chunk, max(1, queries_per_item // per_head))
    parts = -(-chunk // tokens)
    q = jnp.pad(rows.q_rckqh, [(0, 0), (0, parts * tokens - chunk)] + [(0, 0)] * 3)
    q = widen(q).reshape(count * parts, tokens, heads, per_head, -1).transpose(0, 2, 1, 3, 4)
    before, starts, counts = jnp.arange(parts) * tokens, rows.starts_r[:, None], rows.counts_r[:, None]
    mixed = attend_int8_pages(
        in_eights(q.reshape(count * parts, heads, tokens * per_head, -1)),
        pool,
        rows.page_table_rw,
        (starts + before).reshape(-1),
        jnp.where(counts > before, starts + jnp.minimum(before + tokens, counts), 0).reshape(-1),
        per_head=per_head,
        rules=rules,
        scale=rules.scale_of(head_dim),
        keys_per_block=keys_per_block,
        vmem_bytes=vmem_bytes,
        interpret=interpret,
    )[:, :, : tokens * per_head]
    mixed = mixed.reshape(count, parts, heads, tokens, per_head, -1).transpose(0, 1, 3, 2, 4, 5)
    return rows.zero_padding(mixed.reshape(count, parts * tokens, heads, per_head, -1)[:, :chunk, ..., :head_dim]), pool


def attend_int8_pages(
    q_iknh: jax.Array,
    pool: Int8Pool,
    page_table_rw: jax.Array,
    firsts_i: jax.Array,
    ends_i: jax.Array,
    *,
    per_head: int,
    rules: ScoreRules,
    scale: float,
    keys_per_block: int,
    vmem_bytes: int | None,
    interpret: bool,
) -> jax.Array:
    """Return attention of each item's queries to the keys of its row up to their own positions, [i, k, n, h].

    Args:
        q_iknh: queries of a row's tokens, `per_head` of each token; as wide as the pool's heads, a multiple of 8.
        pool: numbers and scales.
        page_table_rw: int32; items are parts of its rows, as many of each.
        firsts_i: int32, the position of an item's first token.
        ends_i: int32, behind the last key that the item sees; 0: it has no live token, and its result is zeros.
        per_head: query heads of a key/value head.
        rules: causal.
        scale: scale of the scores.
        keys_per_block: keys that are fetched at once.
        vmem_bytes: limit of vector memory; None: the compiler's.
        interpret: simulate a TPU.
    """
    items, heads, queries, width = q_iknh.shape
    numbers, pages = pool["numbers"], page_table_rw.shape[1]
    page_size = numbers.shape[1]
    block = min(pages, max(1, keys_per_block // page_size))
    parts = items // len(page_table_rw)
    body = functools.partial(
        _kernel, parts=parts, per_head=per_head, scale=scale, soft_cap=rules.soft_cap, window=rules.window, block=block
    )
    of_item = pl.BlockSpec((None, heads, queries, width), lambda i, *_: (i, 0, 0, 0))
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    keys = items * min(pages * page_size, rules.window or pages * page_size)
    work = {"flops": 4 * queries * keys * heads * width, "bytes": keys * heads * 2 * (width + 4)}
    with simulated(interpret), costs(**work):
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(items,),
                in_specs=[of_item, hbm, hbm],
                out_specs=of_item,
                scratch_shapes=[
                    pltpu.VMEM((2, block * page_size, 2 * heads, width), jnp.int8),
                    pltpu.VMEM((2, block, heads, 2 * page_size), jnp.float32),
                    *BlockSoftmax.scratch(heads, queries, width),
                    pltpu.SemaphoreType.DMA((2,)),
                ],
            ),
            out_shape=jax.ShapeDtypeStruct(q_iknh.shape, q_iknh.dtype),
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_bytes),
            name="attend_int8_pages",
        )(*(x.astype(jnp.int32) for x in (page_table_rw, firsts_i, ends_i)), q_iknh, numbers, pool["scales"])


def _kernel(
    table_rw: Any,
    firsts_i: Any,
    ends_i: Any,
    q_knh: Any,
    numbers: Any,
    scales: Any,
    mixed_knh: Any,
    buffer: Any,
    scale_buffer: Any,
    *scratch: Any,
    parts: int,
    per_head: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    block: int,
) -> None:
    """Attend to the keys of one item."""
    item, page_size = pl.program_id(0), numbers.shape[1]
    row, first, end = item // parts, firsts_i[item], ends_i[item]
    begin = 0 if window is None else jnp.maximum(first - window + 1, 0)
    softmax, arrived = BlockSoftmax(*scratch[:3]), scratch[3]
    softmax.clear()

    def copies(page: jax.Array, slot: jax.Array, place: int) -> tuple[Any, Any]:
        part = buffer.at[slot, pl.ds(place * page_size, page_size)]
        return (
            pltpu.make_async_copy(numbers.at[page], part, arrived.at[slot]),
            pltpu.make_async_copy(scales.at[page], scale_buffer.at[slot, place], arrived.at[slot]),
        )

    def attend(slot: jax.Array, position: jax.Array) -> None:
        shape = (q_knh.shape[1], block * page_size)
        visible = visible_keys(shape, position, first, end, per_head, window)
        k_scales, v_scales = _rows_of_scales(scale_buffer, slot)
        # What is behind the end was left by others: 0 x NaN is NaN.
        v_scales = jnp.where(position + jax.lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1) < end, v_scales, 0.0)
        for head, (k, v) in enumerate(_keys_and_values(buffer, slot, q_knh.dtype)):
            own = slice(head, head + 1)
            softmax.add(head, scores(q_knh[head], k, scale * k_scales[own], soft_cap, visible), v, v_scales[own])

    sizes = {"page_size": page_size, "block": block}
    for_each_block(lambda index: table_rw[row, index], (begin, end), **sizes, copies=copies, attend=attend)
    mixed_knh[...] = softmax.mixed().astype(mixed_knh.dtype)


def _rows_of_scales(buffer: Any, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the scales of a block's keys and those of its values, [k, keys] each."""
    pages, page_size = buffer.shape[1], buffer.shape[3] // 2
    rows = [buffer[slot, page] for page in range(pages)]
    k, v = [row[:, :page_size] for row in rows], [row[:, page_size:] for row in rows]
    return jnp.concatenate(k, axis=1), jnp.concatenate(v, axis=1)


def _keys_and_values(buffer: Any, slot: jax.Array, dtype: Any) -> list[tuple[jax.Array, jax.Array]]:
    """Return the keys and values of each head in a block, [keys, h]: lines 2 * head of each token, and the next ones.

    Four lines share a register's row, the first in the lowest bytes: two heads come with one strided read.
    """
    _, keys, lines, width = buffer.shape
    words = buffer.bitcast(jnp.int32).at[slot].reshape(keys * lines // 4, width)
    found = []
    for pair in range(lines // 4):
        four = words[pl.ds(pair, keys, stride=lines // 4)]
        # Shifted to the left and back, a byte keeps its sign.
        k0, v0, k1, v1 = (((four << (24 - 8 * byte)) >> 24).astype(jnp.float32).astype(dtype) for byte in range(4))
        found += [(k0, v0), (k1, v1)]
    return found
