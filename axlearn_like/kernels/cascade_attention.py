"""Decoding on TPUs over pages that rows have in common: a kernel that attends to a part of the keys, and a merge.

JAX's ragged paged attention reads all pages of each row and does not return the logarithm of its sum of exponentials,
without which parts cannot be merged. This kernel of ours does both passes of cascade attention (Hydragen, Juravsky et
al. 2024, arXiv 2402.05099): the queries of all rows of a tile against the pages that they share, read once, and each
row's queries against its own. New keys and values are written first (`ragged_paged_attention.write_pages`).

A step of the kernel is an item (a tile, or a row): blocks of pages are fetched one ahead of the computation, and the
softmax is that of blockwise kernels, in float32, keys ascending.

Shape letters: i items, n queries of an item and key/value head, r rows, t tiles, p pages; k, q, h, w as in
ragged_paged_attention.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.attention.interface import MASKED, ScoreRules
from axlearn_like.kernels.block_sizes import BlockSizes
from axlearn_like.kernels.ragged_paged_attention import check_table, on_own_heads, simulated, widen, write_pages
from mesh.cost.expected import costs

LANES = 128
DEFAULT = BlockSizes()


def cascade_attention_tpu(
    q_rckqh: jax.Array,
    k_rckh: jax.Array,
    v_rckh: jax.Array,
    pool: jax.Array,
    *,
    page_table_rw: jax.Array,
    starts_r: jax.Array,
    counts_r: jax.Array,
    shared_t: jax.Array,
    sources_t: jax.Array,
    tile: int,
    rules: ScoreRules,
    sizes: BlockSizes = DEFAULT,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Write the new key and value of each row into its pages, then attend to all; keys in common are read once a tile.

    Args:
        q_rckqh: queries, rotated; one token of each row.
        k_rckh: keys, rotated.
        v_rckh: values.
        pool: from `ragged_paged_attention.make_pool`.
        page_table_rw: int32, as of `paged_attention_tpu`.
        starts_r: int32, tokens of the sequence that are already in its pages.
        counts_r: int32, 1, or 0 in idle rows.
        shared_t: int32, keys that the rows of a tile have in common, multiples of the page size.
        sources_t: int32, the row whose pages hold them.
        tile: rows of a tile; the last may have fewer.
        rules: causal, without a window.
        sizes: of blocks, of which `shared_keys` counts.
        interpret: simulate a TPU, which is slow; for tests.

    Returns:
        The mixed values [r, 1, k, q, h], zero in idle rows, and the pool.
    """
    check_table(page_table_rw.shape[0], page_table_rw.shape[1], pool.shape[1])
    body = functools.partial(_on_one_device, tile=tile, rules=rules, sizes=sizes, interpret=interpret)
    return on_own_heads(body, q_rckqh, k_rckh, v_rckh, pool, page_table_rw, starts_r, counts_r, shared_t, sources_t)


def _on_one_device(
    q_rckqh: jax.Array,
    k_rckh: jax.Array,
    v_rckh: jax.Array,
    pool: jax.Array,
    page_table_rw: jax.Array,
    starts_r: jax.Array,
    counts_r: jax.Array,
    shared_t: jax.Array,
    sources_t: jax.Array,
    *,
    tile: int,
    rules: ScoreRules,
    sizes: BlockSizes,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    rows, _, heads, per_head, head_dim = q_rckqh.shape
    pool = write_pages(pool, k_rckh, v_rckh, page_table_rw, starts_r, counts_r, interpret)
    options: dict[str, Any] = {"rules": rules, "scale": rules.scale_of(head_dim), "interpret": interpret}
    attend = functools.partial(attend_pages, keys_per_block=sizes.shared_keys, vmem_bytes=sizes.vmem_bytes, **options)
    q_rkqh = widen(q_rckqh[:, 0]).astype(pool.dtype)
    tiles, idle = len(shared_t), len(shared_t) * tile - rows
    q_tknh = jnp.pad(q_rkqh, [(0, idle)] + [(0, 0)] * 3).reshape(tiles, tile, heads, per_head, -1)
    q_tknh = q_tknh.transpose(0, 2, 1, 3, 4).reshape(tiles, heads, tile * per_head, -1)

    def to_rows(x_tknh: jax.Array) -> jax.Array:
        x = x_tknh[:, :, : tile * per_head].reshape(tiles, heads, tile, per_head, -1)
        return x.transpose(0, 2, 1, 3, 4).reshape(tiles * tile, heads, per_head, -1)[:rows]

    common = attend(_in_eights(q_tknh), pool, page_table_rw[sources_t], jnp.zeros_like(shared_t), shared_t)
    begins = jnp.repeat(shared_t, tile)[:rows]
    ends = jnp.where(counts_r > 0, starts_r + 1, 0)
    own = attend(_in_eights(q_rkqh), pool, page_table_rw, begins, ends)
    parts = [(to_rows(common[0]), to_rows(common[1])), (own[0][:, :, :per_head], own[1][:, :, :per_head])]
    mixed = jnp.where((counts_r > 0)[:, None, None, None], merge(parts), 0)
    return mixed[:, None, ..., :head_dim].astype(q_rckqh.dtype), pool


def _in_eights(q_iknh: jax.Array) -> jax.Array:
    """Return queries whose number is a multiple of 8, the rows of a register."""
    return jnp.pad(q_iknh, [(0, 0), (0, 0), (0, -q_iknh.shape[2] % 8), (0, 0)])


def attend_pages(
    q_iknh: jax.Array,
    pool: jax.Array,
    page_table_ip: jax.Array,
    begins_i: jax.Array,
    ends_i: jax.Array,
    *,
    rules: ScoreRules,
    scale: float,
    keys_per_block: int = DEFAULT.shared_keys,
    vmem_bytes: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return attention of each item's queries to the keys at positions from `begins` to `ends`, which all of them see.

    Args:
        q_iknh: queries, as wide as the pool's heads; their number per key/value head is a multiple of 8.
        pool: as of `ragged_paged_attention.make_pool`, float32 or bfloat16.
        page_table_ip: int32, the index in the pool of each page of an item's keys.
        begins_i: int32, multiples of the page size.
        ends_i: int32; an item without keys has zeros, and the logarithm of zero.
        rules: their soft cap is used.
        scale: of the scores.
        keys_per_block: keys that are fetched at once.
        vmem_bytes: limit of vector memory; None: the compiler's.
        interpret: simulate a TPU.

    Returns:
        Mixed values float32 [i, k, n, h], and log-sum-exps float32 [i, k, n, 128], all lanes the same.
    """
    items, heads, queries, width = q_iknh.shape
    page_size, pages = pool.shape[1], page_table_ip.shape[1]
    block = min(pages, max(1, keys_per_block // page_size))
    body = functools.partial(_kernel, heads=heads, scale=scale, soft_cap=rules.soft_cap, block=block)
    of_item = pl.BlockSpec((None, heads, queries, width), lambda i, *_: (i, 0, 0, 0))
    of_sums = pl.BlockSpec((None, heads, queries, LANES), lambda i, *_: (i, 0, 0, 0))
    reads = items * pages * page_size * 2 * heads * width
    work = {"flops": 2 * queries * reads, "bytes": reads * pool.dtype.itemsize}
    with simulated(interpret), costs(**work):
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(items,),
                in_specs=[of_item, pl.BlockSpec(memory_space=pl.ANY)],
                out_specs=[of_item, of_sums],
                scratch_shapes=[
                    pltpu.VMEM((2, block * page_size, 2 * heads, width), pool.dtype),
                    pltpu.VMEM((heads, queries, width), jnp.float32),
                    pltpu.VMEM((heads, queries, LANES), jnp.float32),
                    pltpu.VMEM((heads, queries, LANES), jnp.float32),
                    pltpu.SemaphoreType.DMA((2,)),
                ],
            ),
            out_shape=[
                jax.ShapeDtypeStruct((items, heads, queries, width), jnp.float32),
                jax.ShapeDtypeStruct((items, heads, queries, LANES), jnp.float32),
            ],
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_bytes),
            name="attend_pages",
        )(page_table_ip.astype(jnp.int32), begins_i.astype(jnp.int32), ends_i.astype(jnp.int32), q_iknh, pool)


def merge(parts: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Return attention over all keys from parts of them: mixed values [..., h] and log-sum-exps [..., 128]."""
    total = functools.reduce(jnp.logaddexp, [sums[..., :1] for _, sums in parts])
    # A part without keys has no weight; a row without any has the sum MASKED, and zeros.
    return sum((mixed * jnp.exp(sums[..., :1] - total) for mixed, sums in parts), start=jnp.zeros(()))


def _kernel(
    table_ip: Any,
    begins_i: Any,
    ends_i: Any,
    q_knh: Any,
    pool: Any,
    mixed_knh: Any,
    sums_knl: Any,
    buffer: Any,
    acc_knh: Any,
    peak_knl: Any,
    total_knl: Any,
    arrived: Any,
    *,
    heads: int,
    scale: float,
    soft_cap: float | None,
    block: int,
) -> None:
    """Attend to one item's keys, a block of pages after the other, the next one under way."""
    item, page_size = pl.program_id(0), pool.shape[1]
    begin, end = begins_i[item], ends_i[item]
    first_page, last_page = begin // page_size, jnp.maximum((end - 1) // page_size, 0)
    blocks = jnp.where(end > begin, (last_page - first_page) // block + 1, 0)
    acc_knh[...], total_knl[...] = jnp.zeros_like(acc_knh), jnp.zeros_like(total_knl)
    peak_knl[...] = jnp.full_like(peak_knl, MASKED)

    def copies(index: jax.Array, act: Any) -> None:
        slot = index % 2
        for place in range(block):
            # Behind the last page it is fetched again: a block has one size, and what is behind the end is masked.
            page = table_ip[item, jnp.minimum(first_page + index * block + place, last_page)]
            part = buffer.at[slot, pl.ds(place * page_size, page_size)]
            act(pltpu.make_async_copy(pool.at[page], part, arrived.at[slot]))

    @pl.when(blocks > 0)
    def _() -> None:
        copies(jnp.int32(0), lambda each: each.start())

    @pl.loop(0, blocks)
    def _block(index: jax.Array) -> None:
        @pl.when(index + 1 < blocks)
        def _() -> None:
            copies(index + 1, lambda each: each.start())

        copies(index, lambda each: each.wait())
        position = begin + index * block * page_size
        for head in range(heads):
            k, v = _keys_and_values(buffer, index % 2, head)
            places = position + jax.lax.broadcasted_iota(jnp.int32, (1, k.shape[0]), 1)
            scores = scale * jax.lax.dot_general(
                q_knh[head], k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
            scores = jnp.where(places < end, scores, MASKED)
            before = peak_knl[head][:, :1]
            peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            weights, shrunk = jnp.exp(scores - peak), jnp.exp(before - peak)
            total = shrunk * total_knl[head][:, :1] + jnp.sum(weights, axis=1, keepdims=True)
            mixed = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            acc_knh[head] = shrunk * acc_knh[head] + mixed
            peak_knl[head] = jnp.broadcast_to(peak, peak_knl.shape[1:])
            total_knl[head] = jnp.broadcast_to(total, total_knl.shape[1:])

    some = total_knl[...] > 0
    mixed_knh[...] = acc_knh[...] / jnp.where(some, total_knl[...], 1.0)[..., :1]
    sums_knl[...] = jnp.where(some, peak_knl[...] + jnp.log(jnp.where(some, total_knl[...], 1.0)), MASKED)


def _keys_and_values(buffer: Any, slot: jax.Array, head: int) -> tuple[jax.Array, jax.Array]:
    """Return one head's keys and values of a block, [keys, h]: line 2 * head of each token, and the next one."""
    _, keys, lines, width = buffer.shape
    if buffer.dtype == jnp.float32:
        flat = buffer.at[slot].reshape(keys * lines, width)
        return flat[pl.ds(2 * head, keys, stride=lines)], flat[pl.ds(2 * head + 1, keys, stride=lines)]
    # Two lines of bfloat16 share a register's row, keys in the lower halves: both come with one strided read.
    words = buffer.bitcast(jnp.uint32).at[slot].reshape(keys * lines // 2, width)
    both = words[pl.ds(head, keys, stride=lines // 2)]
    k, v = both << 16, both & jnp.uint32(0xFFFF0000)
    return tuple(pltpu.bitcast(half, jnp.float32).astype(jnp.bfloat16) for half in (k, v))  # pyright: ignore
