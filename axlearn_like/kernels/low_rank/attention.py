"""Paged attention on TPUs over a cache in rank space: keys and values are made in fast memory, a block at a time.

With keys k = x A B the pages hold x A, of `rank` numbers, in the place of the keys of all heads; values likewise. A
block of pages is fetched, its keys are made by one product with B, normed and rotated, and meet the queries, as in
FlashSVD (Shao et al. 2025, arXiv 2508.01506); they are never in HBM. Of values:

* few queries: weights of the softmax are summed in rank space, [queries, rank], and multiplied with B once, at the end;
* many: values are made as keys are, which then takes fewer FLOPs.

Keys cannot be left in rank space, as those of latent attention can, because they are rotated behind B.

A step of the kernel is an item, some tokens of one row, with the queries of all heads; a block's keys are made once for
all of these. Two halves of a head are padded apart, so that a rotation is one roll of a register.

Shape letters: r rows, c tokens of a row's chunk, k, q, h key/value heads, query heads of each and their width, l rank;
i items, t tokens of an item, n queries of one and a key/value head, w their padded width, s keys of a block.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.low_rank.factors import KeySteps, KeyValueFactors, in_halves
from axlearn_like.kernels.low_rank.keys import ItemQueries, KeyMatrices, block_angles, finish_keys, make_heads
from axlearn_like.kernels.paged_attention.pages import write_pages
from axlearn_like.kernels.paged_attention.rows import (
    DEFAULT,
    LANES,
    BlockSizes,
    PagedRows,
    RankRows,
    check_rules,
    check_table,
)
from axlearn_like.kernels.paged_attention.simulation import simulated
from axlearn_like.kernels.paged_attention.softmax_blocks import (
    BlockSoftmax,
    for_each_block,
    keys_and_values,
    page_copies,
    scores,
)
from mesh.cost.expected import costs
from mesh.rules import constrain, partition

TOKENS = 128  # limit of an item's tokens
_VMEM = 48 << 20  # bytes that the kernel may use of fast memory


def rank_space_attention(
    rows: RankRows,
    pool: jax.Array,
    factors: KeyValueFactors,
    *,
    rules: ScoreRules,
    sinks: bool = False,
    sizes: BlockSizes = DEFAULT,
    tokens_per_item: int = TOKENS,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Write the new tokens of each row into its pages, then attend.

    Args, results and errors are those of `ragged_attention`; `pool` is one of `make_rank_pool`, which every device of a
    mesh has, with the factors of its own heads. Of `sizes` keys count; `tokens_per_item` are the most tokens of a row
    for which its keys are made together.
    """
    check_rules(rules, sinks)
    options: dict[str, Any] = {"sizes": sizes, "tokens_per_item": tokens_per_item, "interpret": interpret}
    body = functools.partial(_on_one_device, rules=rules, **options)
    if jax.sharding.get_abstract_mesh().empty:
        return body(rows, pool, factors)
    queries: Any = partition(None, None, "heads", None, None)
    specs: Any = (
        jax.tree.map(lambda x: partition(*[None] * x.ndim), rows)._replace(q_rckqh=queries),
        partition(*[None] * 4),
        factors.specs(),
    )
    args = jax.tree.map(jax.sharding.reshard, (rows, pool, factors), specs)
    mixed, pool = jax.shard_map(body, in_specs=specs, out_specs=(queries, specs[1]), check_vma=False)(*args)
    return constrain(mixed, "batch", None, "heads", None, None), pool


def _on_one_device(
    rows: RankRows,
    pool: jax.Array,
    factors: KeyValueFactors,
    *,
    rules: ScoreRules,
    sizes: BlockSizes,
    tokens_per_item: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    count, chunk, heads, per_head, head_dim = rows.q_rckqh.shape
    k, v = (_in_lines(x, pool) for x in (rows.k_rcl, rows.v_rcl))
    written = PagedRows(rows.q_rckqh, k, v, *rows[3:])
    check_table(written, pool.shape[1])
    pool = write_pages(pool, written, interpret)
    tokens = pl.next_power_of_2(min(chunk, tokens_per_item))
    parts = -(-chunk // tokens)
    q = jnp.pad(rows.q_rckqh, [(0, 0), (0, parts * tokens - chunk)] + [(0, 0)] * 3).astype(pool.dtype)
    q = in_halves(q).reshape(count * parts, tokens, heads, per_head, -1)
    before, starts, counts = jnp.arange(parts) * tokens, rows.starts_r[:, None], rows.counts_r[:, None]
    mixed = _attend_items(
        q,
        pool,
        rows.page_table_rw,
        (starts + before).reshape(-1),
        jnp.where(counts > before, starts + jnp.minimum(before + tokens, counts), 0).reshape(-1),
        factors,
        rules=rules,
        limits=_Limits(sizes.row_keys if chunk == 1 else sizes.chunk_keys, sizes.vmem_bytes or _VMEM, interpret),
    )
    mixed = mixed.reshape(count, parts * tokens, heads, per_head, -1)[:, :chunk, ..., :head_dim]
    if factors.v_bias_kh is not None:  # the weights of a softmax add up to 1
        mixed = mixed + factors.v_bias_kh[:, None].astype(mixed.dtype)
    return written.zero_padding(mixed.astype(rows.q_rckqh.dtype)), pool


def _in_lines(x_rcl: jax.Array, pool: jax.Array) -> jax.Array:
    """Return rows in rank space as the lines of a pool, [r, c, lines / 2, 128]."""
    wide = pool.shape[2] // 2 * LANES
    x = jnp.pad(x_rcl, [(0, 0), (0, 0), (0, wide - x_rcl.shape[-1])])
    return x.reshape(*x.shape[:2], -1, LANES)


class _Limits(NamedTuple):
    """Keys of a block and bytes of fast memory, at most; `interpret`: simulate a TPU."""

    keys: int
    vmem: int
    interpret: bool


def _attend_items(
    q_itkqw: jax.Array,
    pool: jax.Array,
    page_table_rw: jax.Array,
    firsts_i: jax.Array,
    ends_i: jax.Array,
    factors: KeyValueFactors,
    *,
    rules: ScoreRules,
    limits: _Limits,
) -> jax.Array:
    """Return attention of each item's tokens to its row's pages up to their own positions, [i, t, k, q, w].

    `firsts_i`, `ends_i`: int32, the position of an item's first token, and behind its last; 0: none is live.
    """
    (items, tokens, heads, per_head, width), (page_size, lines) = q_itkqw.shape, pool.shape[1:3]
    rank, longest = lines // 2 * LANES, page_table_rw.shape[1] * page_size
    block = max(1, min(limits.keys, -(-longest // 64) * 64) // page_size)
    keys = block * page_size
    whole = KeyMatrices.of(factors, rank, pool.dtype), factors.rotation(keys, -(-longest // keys))
    q = ItemQueries.of(tokens, heads, per_head, width)
    # FLOPs for each key and head: of values that are made, and of sums in rank space instead of over a head's width.
    in_rank = q.count * (rank - width) < rank * width
    form, parts = jax.tree.structure(whole), items // len(page_table_rw)
    body = functools.partial(_kernel, _Item(q, rules, factors.steps, form, parts, block, in_rank))
    arranged = q.arranged(q_itkqw)
    state = (1, heads * q.count, rank) if in_rank else (heads, q.count, width)
    seen = items * min(longest, rules.window or longest)
    made = rank * width * heads * (1 if in_rank else 2) + q.count * heads * (width + state[-1])
    moved = seen * lines * LANES * pool.dtype.itemsize + 2 * arranged.size * arranged.dtype.itemsize
    with simulated(limits.interpret), costs(flops=2 * seen * made, bytes=moved):
        mixed = pl.pallas_call(
            body,
            grid_spec=_grid(arranged, jax.tree.leaves(whole), pltpu.VMEM((2, keys, lines, LANES), pool.dtype), state),
            out_shape=jax.ShapeDtypeStruct(arranged.shape, arranged.dtype),
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limits.vmem),
            name="rank_space_attention",
        )(
            *(x.astype(jnp.int32) for x in (page_table_rw, firsts_i, ends_i)),
            *(arranged, pool, *jax.tree.leaves(whole)),
        )
    return q.as_tokens(mixed)


def _grid(arranged: jax.Array, whole: list[jax.Array], buffer: Any, state: tuple[int, ...]) -> Any:
    """Return the grid of items: `whole` are fetched once, blocks of pages into the buffer, `state` is the softmax's."""
    fetched_once = [pl.BlockSpec(x.shape, lambda i, *_: (0, 0), pipeline_mode=pl.Buffered(1)) for x in whole]
    of_item = pl.BlockSpec((None, *arranged.shape[1:]), lambda i, *_: (i,) + (0,) * (arranged.ndim - 1))
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(len(arranged),),
        in_specs=[of_item, pl.BlockSpec(memory_space=pl.ANY), *fetched_once],
        out_specs=of_item,
        scratch_shapes=[buffer, *BlockSoftmax.scratch(*state), pltpu.SemaphoreType.DMA((2,))],
    )


class _Item(NamedTuple):
    """Facts about all items that are known when the kernel is traced."""

    q: ItemQueries  # order of queries in memory
    rules: ScoreRules  # masks and score transformations
    steps: KeySteps  # steps between the product that makes keys and attention
    form: Any  # tree of the arrays that stay in fast memory
    parts: int  # items of a row
    block: int  # pages of a block
    in_rank: bool  # values are summed in rank space


def _kernel(one: _Item, table_rw: Any, firsts_i: Any, ends_i: Any, queries: Any, pool: Any, *refs: Any) -> None:
    q, rules, steps, form, parts, block, in_rank = one
    whole, tables = jax.tree.unflatten(form, refs[: form.num_leaves])
    mixed, buffer, *state, arrived = refs[form.num_leaves :]
    item, page_size, dtype = pl.program_id(0), pool.shape[1], queries.dtype
    row, first, end = item // parts, firsts_i[item], ends_i[item]
    keys = block * page_size
    # Blocks begin at multiples of their size, for which there are angles.
    begin = 0 if rules.window is None else jnp.maximum(first - rules.window + 1, 0) // keys * keys
    softmax = BlockSoftmax(*state)
    softmax.clear()

    def attend(slot: jax.Array, position: jax.Array) -> None:
        low_k, low_v = _rank_space(buffer, slot)
        angles = block_angles(tables, position // keys)
        visible, seen = q.visible(keys, position, first, end, rules.window), []
        values = None if in_rank else make_heads(low_v, whole.v_lo, q.width)
        for head, k in make_heads(low_k, whole.k_lo, q.width):
            k = finish_keys(k, head, whole, angles, steps).astype(dtype)
            found = scores(q.read(queries, head), k, rules.scale_of(steps.head_dim), rules.soft_cap, visible)
            if values is None:
                seen.append(found)
            else:
                softmax.add(head, found, next(values)[1].astype(dtype))
        if seen:
            softmax.add(0, jnp.concatenate(seen), low_v)

    for_each_block(
        lambda index: table_rw[row, index],
        (begin, end),
        page_size=page_size,
        block=block,
        copies=page_copies(pool, buffer, arrived),
        attend=attend,
    )
    found = softmax.mixed()
    for head in range(q.heads):
        if not in_rank:
            q.write(mixed, head, found[head])
            continue
        low = found[0, head * q.count : (head + 1) * q.count].astype(dtype)
        columns = slice(head * q.width, (head + 1) * q.width)
        q.write(mixed, head, jnp.dot(low, whole.v_lo[:, columns], preferred_element_type=jnp.float32))


def _rank_space(buffer: Any, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return keys and values of a block in rank space, [s, l] each."""
    both = [keys_and_values(buffer, slot, chunk) for chunk in range(buffer.shape[2] // 2)]
    k, v = zip(*both, strict=True)
    return jnp.concatenate(k, axis=1), jnp.concatenate(v, axis=1)
