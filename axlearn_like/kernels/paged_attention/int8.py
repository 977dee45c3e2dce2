"""Paged attention on TPU over keys and values of eight bits, by a kernel of ours.

JAX's ragged paged attention takes pages of int8 with one scale for all of them, fixed when it is compiled; newer ones
refuse them. Here each token and head has its own (int8_heads.py). Numbers are multiplied as they are, exact in
bfloat16; scales go to the scores and to the weights of the softmax, both of which have keys along a register's lanes.

A step of the kernel is an item, some queries of one row; its keys come in blocks of pages (softmax_blocks.py).

Scales are stored beside the pages: for each page and head a row of the keys' scales and the values' behind them, 128
numbers for 64 tokens, as wide as a register. New numbers are written by `write_pages`, new scales into copies of their
pages' rows, which go back whole.

Shape letters: p pages touched by a row's new tokens, g all of these, l = 2 * page size lanes of scales; i items,
n queries of an item and key/value head; others as in rows.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.int8_heads import round_heads
from axlearn_like.kernels.paged_attention.items import ItemCall, ItemPlan, attend_in_items, run_items
from axlearn_like.kernels.paged_attention.pages import make_pool, touched_pages, write_pages
from axlearn_like.kernels.paged_attention.rows import (
    DEFAULT,
    PLAIN,
    BlockSizes,
    PagedRows,
    check_rules,
    check_table,
    on_own_heads,
)
from axlearn_like.kernels.paged_attention.simulation import simulated
from axlearn_like.kernels.paged_attention.softmax_blocks import (
    BlockSoftmax,
    block_buffer,
    for_each_block,
    page_copies,
    scores,
    visible_keys,
)
from mesh.cost.expected import KernelCost, costs
from mesh.rules import partition

SCALES_PER_STEP = 64  # pages whose scales are written at once

Int8Pool = dict[str, jax.Array]  # numbers int8 [pages, page size, 2 k, h], scales float32 [pages, k, l]


def make_int8_kernel_pool(num_layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int) -> Int8Pool:
    """Return an empty pool for all layers; numbers as of `pages.make_pool`.

    Raises:
        UserError: the kernel cannot lay out that many heads on one device.
    """
    numbers = make_pool(num_layers, pages, page_size, kv_heads, head_dim, jnp.int8)
    shape = (num_layers * pages, kv_heads, 2 * page_size)
    return {"numbers": numbers, "scales": jnp.zeros(shape, jnp.float32, out_sharding=partition(None, "heads", None))}


def has_scales(pool: Any) -> bool:
    """Return True if a pool of the kernels for TPUs holds int8."""
    return isinstance(pool, dict) and "numbers" in pool


def write_int8_pages(pool: Int8Pool, rows: PagedRows, interpret: bool) -> Int8Pool:
    """Return the pool with the live new tokens, rounded, in their pages; on one device."""
    k, v = round_heads(rows.k_rckh), round_heads(rows.v_rckh)
    numbers = rows._replace(k_rckh=k.numbers, v_rckh=v.numbers)
    return {
        "numbers": write_pages(pool["numbers"], numbers, interpret),
        "scales": _write_scales(pool["scales"], k.scales[..., 0], v.scales[..., 0], rows, interpret),
    }


def _write_scales(
    scales_gkl: jax.Array, k_rck: jax.Array, v_rck: jax.Array, rows: PagedRows, interpret: bool
) -> jax.Array:
    """Return the pool's scales with those of the live new tokens in the rows of their pages."""
    heads, lanes = scales_gkl.shape[1:]
    new_gkl, *numbers = _new_scales(k_rck, v_rck, rows, lanes // 2)
    step = min(SCALES_PER_STEP, len(new_gkl))
    rest = -len(new_gkl) % step
    numbers = (jnp.pad(x.reshape(-1).astype(jnp.int32), (0, rest)) for x in numbers)
    block = pl.BlockSpec((step, heads, lanes), lambda g, *_: (g, 0, 0))
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    with simulated(interpret), costs(flops=0, bytes=3 * 4 * new_gkl.size):
        return pl.pallas_call(
            _write_scales_kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=((len(new_gkl) + rest) // step,),
                in_specs=[block, hbm],
                out_specs=hbm,
                scratch_shapes=[pltpu.VMEM((step, heads, lanes), jnp.float32), pltpu.SemaphoreType.DMA],
            ),
            out_shape=jax.ShapeDtypeStruct(scales_gkl.shape, scales_gkl.dtype),
            input_output_aliases={4: 0},
            name="write_scales",
        )(*numbers, jnp.pad(new_gkl, [(0, rest), (0, 0), (0, 0)]), scales_gkl)


def _new_scales(k_rck: jax.Array, v_rck: jax.Array, rows: PagedRows, page_size: int) -> tuple[jax.Array, ...]:
    """Return the scales as they lie in the touched pages, [g, k, l], the pages, and their first and last new slots."""
    count, chunk, heads = k_rck.shape
    pages_rp = touched_pages(rows, page_size)
    begins = jnp.arange(pages_rp.shape[1]) * page_size - (rows.starts_r % page_size)[:, None]  # the token at slot 0
    firsts, ends = jnp.maximum(-begins, 0), jnp.clip(rows.counts_r[:, None] - begins, 0, page_size)
    token = jnp.clip(begins[..., None] + jnp.arange(page_size), 0, chunk - 1).reshape(count, -1)
    both = jnp.stack([k_rck, v_rck], axis=2)  # [r, c, 2, k]
    new = jnp.take_along_axis(both, token[:, :, None, None], axis=1) if chunk > 1 else both
    new = jnp.broadcast_to(new, (count, token.shape[1], 2, heads)).reshape(count, -1, page_size, 2, heads)
    return new.transpose(0, 1, 4, 3, 2).reshape(-1, heads, 2 * page_size), pages_rp, firsts, ends


def _write_scales_kernel(
    pages_g: Any, firsts_g: Any, ends_g: Any, new_gkl: Any, before: Any, pool: Any, rows_gkl: Any, semaphore: Any
) -> None:
    """Fetch the rows of some pages, put the scales of new tokens into them, and store them; no page is there twice."""
    step, heads, lanes = new_gkl.shape
    begin = pl.program_id(0) * step

    def for_each_live(act: Any) -> None:
        @pl.loop(0, step)
        def _page(at: jax.Array) -> None:
            @pl.when(ends_g[begin + at] > firsts_g[begin + at])
            def _() -> None:
                act(at)

    def fetch(at: jax.Array) -> Any:
        return pltpu.make_async_copy(before.at[pages_g[begin + at]], rows_gkl.at[at], semaphore)

    def store(at: jax.Array) -> Any:
        return pltpu.make_async_copy(rows_gkl.at[at], pool.at[pages_g[begin + at]], semaphore)

    def put(at: jax.Array) -> None:
        slots = jax.lax.broadcasted_iota(jnp.int32, (heads, lanes), 1) % (lanes // 2)
        written = (slots >= firsts_g[begin + at]) & (slots < ends_g[begin + at])
        rows_gkl[at] = jnp.where(written, new_gkl[at], rows_gkl[at])

    for_each_live(lambda at: fetch(at).start())
    for_each_live(lambda at: fetch(at).wait())
    for_each_live(put)
    for_each_live(lambda at: store(at).start())
    for_each_live(lambda at: store(at).wait())


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
    body = functools.partial(
        _on_one_device, rules=rules, sizes=sizes, queries_per_item=queries_per_item, interpret=interpret
    )
    return on_own_heads(body, rows, pool)


def _on_one_device(
    rows: PagedRows,
    pool: Int8Pool,
    *,
    rules: ScoreRules,
    sizes: BlockSizes,
    queries_per_item: int,
    interpret: bool,
) -> tuple[jax.Array, Int8Pool]:
    pool = write_int8_pages(pool, rows, interpret)
    numbers, table = pool["numbers"], rows.page_table_rw
    (count, chunk, _, per_head, head_dim), page_size, pages = rows.q_rckqh.shape, numbers.shape[1], table.shape[1]
    block = min(pages, max(1, (sizes.row_keys if chunk == 1 else sizes.chunk_keys) // page_size))
    plan = ItemPlan(rules, rules.scale_of(head_dim), block, per_head)

    def attend(q_iknh: jax.Array, firsts_i: jax.Array, ends_i: jax.Array) -> jax.Array:
        items, heads, queries, width = q_iknh.shape
        keys = items * min(pages * page_size, rules.window or pages * page_size)
        work = KernelCost(4 * queries * keys * heads * width, keys * heads * 2 * (width + 4))
        return run_items(
            functools.partial(_kernel, plan, items // count),
            (table, firsts_i, ends_i),
            q_iknh,
            [
                (numbers, block_buffer(numbers, block * page_size)),
                (pool["scales"], (2, block, heads, 2 * page_size)),
            ],
            jax.ShapeDtypeStruct(q_iknh.shape, q_iknh.dtype),
            ItemCall("attend_int8_pages", work, sizes.vmem_bytes, interpret),
        )

    queries = min(chunk * per_head, queries_per_item)
    return rows.zero_padding(attend_in_items(attend, rows.q_rckqh, rows.starts_r, rows.counts_r, queries)), pool


def _kernel(plan: ItemPlan, parts: int, *refs: Any) -> None:
    table_rw, firsts_i, ends_i, q_knh, numbers, scales, mixed_knh, buffer, scale_buffer, *state, arrived = refs
    item, page_size, window = pl.program_id(0), numbers.shape[1], plan.rules.window
    row, first, end = item // parts, firsts_i[item], ends_i[item]
    begin = 0 if window is None else jnp.maximum(first - window + 1, 0)
    softmax = BlockSoftmax(*state)
    softmax.clear()

    of_numbers = page_copies(numbers, buffer, arrived)

    def copies(page: jax.Array, slot: jax.Array, place: int) -> list[Any]:
        of_scales = pltpu.make_async_copy(scales.at[page], scale_buffer.at[slot, place], arrived.at[slot])
        return [*of_numbers(page, slot, place), of_scales]

    def attend(slot: jax.Array, position: jax.Array) -> None:
        shape = (q_knh.shape[1], plan.block * page_size)
        visible = visible_keys(shape, position, first, end, plan.per_head, window)
        k_scales, v_scales = _rows_of_scales(scale_buffer, slot)
        # Numbers behind the end were left by others: 0 x NaN is NaN.
        v_scales = jnp.where(position + jax.lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1) < end, v_scales, 0.0)
        for head, (k, v) in enumerate(_keys_and_values(buffer, slot, q_knh.dtype)):
            own = slice(head, head + 1)
            found = scores(q_knh[head], k, plan.scale * k_scales[own], plan.rules.soft_cap, visible)
            softmax.add(head, found, v, v_scales[own])

    sizes = {"page_size": page_size, "block": plan.block}
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
    if buffer.ndim == 5:
        parts = [_of_block(buffer.at[slot, part], dtype) for part in range(buffer.shape[1])]
        pairs = [zip(*of_head, strict=True) for of_head in zip(*parts, strict=True)]
        return [tuple(jnp.concatenate(found, axis=1) for found in pair) for pair in pairs]  # pyright: ignore
    return _of_block(buffer.at[slot], dtype)


def _of_block(block: Any, dtype: Any) -> list[tuple[jax.Array, jax.Array]]:
    keys, lines, width = block.shape
    words = block.bitcast(jnp.int32).reshape(keys * lines // 4, width)
    found = []
    for pair in range(lines // 4):
        four = words[pl.ds(pair, keys, stride=lines // 4)]
        # Shifted to the left and back, a byte keeps its sign.
        k0, v0, k1, v1 = (((four << (24 - 8 * byte)) >> 24).astype(jnp.float32).astype(dtype) for byte in range(4))
        found += [(k0, v0), (k1, v1)]
    return found
