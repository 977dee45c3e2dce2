"""Paged attention on TPU over keys and values of eight bits, by kernels of ours.

JAX's ragged paged attention takes pages of int8 with one scale for all of them, fixed when it is compiled; newer ones
refuse them. Here each token and head has its own (int8_heads.py), stored beside the pages: for each page and head a row
of the keys' scales and the values' behind them, 128 numbers for 64 tokens, as wide as a register. Numbers are
multiplied as they are, exact in bfloat16; scales go to the scores and to the weights of the softmax, both of which have
keys along a register's lanes.

A step of the kernel is an item, some queries of one row: blocks of pages are fetched one ahead of the computation, and
the softmax is that of blockwise kernels, in float32, keys ascending. New numbers are written by `write_pages`, new
scales into copies of their pages' rows, which go back whole.

Shape letters: i items, n queries of an item and key/value head, t tokens of an item, p pages touched by a row's new
tokens, g all of these, l = 2 * page size lanes of scales; r, c, w, k, q, h as in ragged_paged_attention.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.attention.interface import MASKED, ScoreRules
from axlearn_like.kernels.block_sizes import BlockSizes
from axlearn_like.kernels.int8_heads import round_heads
from axlearn_like.kernels.ragged_paged_attention import (
    PLAIN,
    check_rules,
    check_table,
    make_pool,
    on_own_heads,
    simulated,
    touched_pages,
    widen,
    write_pages,
)
from mesh.cost.expected import costs
from mesh.rules import partition

LANES = 128
DEFAULT = BlockSizes()
QUERIES = 128  # of an item, of all heads that share a key/value head
SCALES_PER_STEP = 64  # pages whose scales are written at once

Pool = dict[str, jax.Array]  # numbers int8 [pages, page size, 2 k, h], scales float32 [pages, k, l]


def make_int8_kernel_pool(num_layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int) -> Pool:
    """Return an empty pool for all layers; numbers as of `ragged_paged_attention.make_pool`.

    Raises:
        UserError: the kernel cannot lay out that many heads on one device.
    """
    numbers = make_pool(num_layers, pages, page_size, kv_heads, head_dim, jnp.int8)
    shape = (num_layers * pages, kv_heads, 2 * page_size)
    return {"numbers": numbers, "scales": jnp.zeros(shape, jnp.float32, out_sharding=partition(None, "heads", None))}


def has_scales(pool: Any) -> bool:
    """Return True if a pool of the kernels for TPUs holds int8."""
    return isinstance(pool, dict) and "numbers" in pool


def int8_paged_attention_tpu(
    q_rckqh: jax.Array,
    k_rckh: jax.Array,
    v_rckh: jax.Array,
    pool: Pool,
    *,
    page_table_rw: jax.Array,
    starts_r: jax.Array,
    counts_r: jax.Array,
    rules: ScoreRules = PLAIN,
    sinks: bool = False,
    sizes: BlockSizes = DEFAULT,
    queries_per_item: int = QUERIES,
    interpret: bool = False,
) -> tuple[jax.Array, Pool]:
    """Round new keys and values and write them, then attend to all pages, up to and including each token.

    Args, results and errors are those of `ragged_paged_attention.paged_attention_tpu`; `pool` is one of
    `make_int8_kernel_pool`, of `sizes` keys count, and `queries_per_item` are the most queries of a row and head that
    read its keys together.
    """
    check_rules(rules, sinks)
    check_table(page_table_rw.shape[0], page_table_rw.shape[1], pool["numbers"].shape[1])
    keys = sizes.row_keys if q_rckqh.shape[1] == 1 else sizes.chunk_keys
    blocks: dict[str, Any] = {"keys_per_block": keys, "queries_per_item": queries_per_item}
    blocks |= {"vmem_bytes": sizes.vmem_bytes}
    body = functools.partial(_on_one_device, rules=rules, interpret=interpret, **blocks)
    return on_own_heads(body, q_rckqh, k_rckh, v_rckh, pool, page_table_rw, starts_r, counts_r)


def _on_one_device(
    q_rckqh: jax.Array,
    k_rckh: jax.Array,
    v_rckh: jax.Array,
    pool: Pool,
    page_table_rw: jax.Array,
    starts_r: jax.Array,
    counts_r: jax.Array,
    *,
    rules: ScoreRules,
    keys_per_block: int,
    vmem_bytes: int | None,
    queries_per_item: int,
    interpret: bool,
) -> tuple[jax.Array, Pool]:
    places = page_table_rw, starts_r, counts_r
    k, v = round_heads(k_rckh), round_heads(v_rckh)
    pool = {
        "numbers": write_pages(pool["numbers"], k.numbers, v.numbers, *places, interpret),
        "scales": write_scales(pool["scales"], k.scales[..., 0], v.scales[..., 0], *places, interpret),
    }
    rows, chunk, heads, per_head, head_dim = q_rckqh.shape
    tokens = min(chunk, max(1, queries_per_item // per_head))
    parts = -(-chunk // tokens)
    q = jnp.pad(q_rckqh, [(0, 0), (0, parts * tokens - chunk)] + [(0, 0)] * 3)
    q = widen(q).reshape(rows * parts, tokens, heads, per_head, -1).transpose(0, 2, 1, 3, 4)
    q_iknh = q.reshape(rows * parts, heads, tokens * per_head, -1)
    before = jnp.arange(parts) * tokens
    firsts = starts_r[:, None] + before
    ends = jnp.where(counts_r[:, None] > before, starts_r[:, None] + jnp.minimum(before + tokens, counts_r[:, None]), 0)
    mixed = attend_int8_pages(
        jnp.pad(q_iknh, [(0, 0), (0, 0), (0, -q_iknh.shape[2] % 8), (0, 0)]),
        pool,
        page_table_rw,
        firsts.reshape(-1),
        ends.reshape(-1),
        per_head=per_head,
        rules=rules,
        scale=rules.scale_of(head_dim),
        keys_per_block=keys_per_block,
        vmem_bytes=vmem_bytes,
        interpret=interpret,
    )[:, :, : tokens * per_head]
    mixed = mixed.reshape(rows, parts, heads, tokens, per_head, -1).transpose(0, 1, 3, 2, 4, 5)
    mixed = mixed.reshape(rows, parts * tokens, heads, per_head, -1)[:, :chunk, ..., :head_dim]
    live = jnp.arange(chunk) < counts_r[:, None]
    return jnp.where(live[:, :, None, None, None], mixed, 0), pool


# ---- writing


def write_scales(
    scales_gkl: jax.Array,
    k_rck: jax.Array,
    v_rck: jax.Array,
    page_table_rw: jax.Array,
    starts_r: jax.Array,
    counts_r: jax.Array,
    interpret: bool,
) -> jax.Array:
    """Return the pool's scales with those of the live new tokens in the rows of their pages; on one device."""
    (rows, chunk, heads), lanes = k_rck.shape, scales_gkl.shape[2]
    page_size = lanes // 2
    pages_rp = touched_pages(page_table_rw, starts_r, chunk, page_size)
    begins = jnp.arange(pages_rp.shape[1]) * page_size - (starts_r % page_size)[:, None]  # the token at slot 0
    firsts, ends = jnp.maximum(-begins, 0), jnp.clip(counts_r[:, None] - begins, 0, page_size)
    token = jnp.clip(begins[..., None] + jnp.arange(page_size), 0, chunk - 1).reshape(rows, -1)
    both = jnp.stack([k_rck, v_rck], axis=2)  # [r, c, 2, k]
    new = jnp.take_along_axis(both, token[:, :, None, None], axis=1) if chunk > 1 else both
    new = jnp.broadcast_to(new, (rows, token.shape[1], 2, heads)).reshape(rows, -1, page_size, 2, heads)
    new_gkl = new.transpose(0, 1, 4, 3, 2).reshape(-1, heads, lanes)
    step = min(SCALES_PER_STEP, len(new_gkl))
    rest = -len(new_gkl) % step
    numbers = (jnp.pad(x.reshape(-1).astype(jnp.int32), (0, rest)) for x in (pages_rp, firsts, ends))
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


# ---- attention


def attend_int8_pages(
    q_iknh: jax.Array,
    pool: Pool,
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
        scale: of the scores.
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
                    pltpu.VMEM((heads, queries, width), jnp.float32),
                    pltpu.VMEM((heads, queries, LANES), jnp.float32),
                    pltpu.VMEM((heads, queries, LANES), jnp.float32),
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
    acc_knh: Any,
    peak_knl: Any,
    total_knl: Any,
    arrived: Any,
    *,
    parts: int,
    per_head: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    block: int,
) -> None:
    """Attend to the keys of one item, a block of pages after the other, the next one under way."""
    item, page_size = pl.program_id(0), numbers.shape[1]
    row, first, end = item // parts, firsts_i[item], ends_i[item]
    first_page = 0 if window is None else jnp.maximum(first - window + 1, 0) // page_size
    last_page = jnp.maximum((end - 1) // page_size, 0)
    blocks = jnp.where(end > 0, (last_page - first_page) // block + 1, 0)
    acc_knh[...], total_knl[...] = jnp.zeros_like(acc_knh), jnp.zeros_like(total_knl)
    peak_knl[...] = jnp.full_like(peak_knl, MASKED)

    def copies(index: jax.Array, act: Any) -> None:
        slot = index % 2
        for place in range(block):
            # Behind the last page it is fetched again: a block has one size, and what is behind the end is masked.
            page = table_rw[row, jnp.minimum(first_page + index * block + place, last_page)]
            part = buffer.at[slot, pl.ds(place * page_size, page_size)]
            act(pltpu.make_async_copy(numbers.at[page], part, arrived.at[slot]))
            act(pltpu.make_async_copy(scales.at[page], scale_buffer.at[slot, place], arrived.at[slot]))

    @pl.when(blocks > 0)
    def _() -> None:
        copies(jnp.int32(0), lambda each: each.start())

    @pl.loop(0, blocks)
    def _block(index: jax.Array) -> None:
        @pl.when(index + 1 < blocks)
        def _() -> None:
            copies(index + 1, lambda each: each.start())

        copies(index, lambda each: each.wait())
        shape = (q_knh.shape[1], block * page_size)
        keys = (first_page + index * block) * page_size + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        positions = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0) // per_head
        visible = (keys <= positions) & (keys < end)
        if window is not None:
            visible &= keys > positions - window
        k_scales, v_scales = _rows_of_scales(scale_buffer, index % 2)
        # What is behind the end was left by others: 0 x NaN is NaN.
        v_scales = jnp.where(keys[:1] < end, v_scales, 0.0)
        for head, (k, v) in enumerate(_keys_and_values(buffer, index % 2, q_knh.dtype)):
            scores = jax.lax.dot_general(
                q_knh[head], k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            ) * (scale * k_scales[head : head + 1])
            scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
            scores = jnp.where(visible, scores, MASKED)
            before = peak_knl[head][:, :1]
            peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            weights, shrunk = jnp.exp(scores - peak), jnp.exp(before - peak)
            total = shrunk * total_knl[head][:, :1] + jnp.sum(weights, axis=1, keepdims=True)
            weights = (weights * v_scales[head : head + 1]).astype(v.dtype)
            acc_knh[head] = shrunk * acc_knh[head] + jnp.dot(weights, v, preferred_element_type=jnp.float32)
            peak_knl[head] = jnp.broadcast_to(peak, peak_knl.shape[1:])
            total_knl[head] = jnp.broadcast_to(total, total_knl.shape[1:])

    total = total_knl[...][..., :1]
    mixed_knh[...] = (acc_knh[...] / jnp.where(total > 0, total, 1.0)).astype(mixed_knh.dtype)


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
