"""Attention over a paged cache on TPU by the kernel of JAX, after new keys and values are written.

`jax.experimental.pallas.ops.tpu.ragged_paged_attention` ("Ragged Paged Attention", arXiv 2604.15464) reads pages but
does not write them, so the kernel of pages.py goes first. Both work in place.

Shape letters: as in rows.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.pages import write_pages
from axlearn_like.kernels.paged_attention.rows import (
    DEFAULT,
    PLAIN,
    BlockSizes,
    PagedRows,
    check_rules,
    check_table,
    on_own_heads,
    widen,
)
from axlearn_like.kernels.paged_attention.simulation import simulated
from mesh.cost.expected import KernelCost, costs


def ragged_attention(
    rows: PagedRows,
    pool: jax.Array,
    *,
    rules: ScoreRules = PLAIN,
    sinks: bool = False,
    sizes: BlockSizes = DEFAULT,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Write the new keys and values of each row into its pages, then attend to all up to and including each token.

    Softmax in float32. Under a mesh every device works on its own heads, and on all rows.

    Args:
        pool: from `pages.make_pool`.
        rules: rules of attention; it is causal.
        sinks: heads have sinks, which this kernel does not support.
        sizes: sizes of blocks: those of rows where each has one token, else those of chunks.

    Returns:
        The mixed values [r, c, k, q, h], zero where there is no live token, and the pool.

    Raises:
        UserError: the page table is too large, or the kernel does not support the rules.
    """
    check_rules(rules, sinks)
    check_table(rows, pool.shape[1])
    (count, width), chunk = rows.page_table_rw.shape, rows.k_rckh.shape[1]
    keys, queries = (sizes.row_keys, sizes.row_queries) if chunk == 1 else (sizes.chunk_keys, sizes.chunk_queries)
    blocks = {
        "num_kv_pages_per_block": min(width, max(1, keys // pool.shape[1])),
        "num_queries_per_block": min(count * chunk, queries),
        "vmem_limit_bytes": sizes.vmem_bytes,
    }
    return on_own_heads(functools.partial(_on_one_device, rules=rules, blocks=blocks, interpret=interpret), rows, pool)


def _on_one_device(
    rows: PagedRows, pool: jax.Array, *, rules: ScoreRules, blocks: dict[str, int | None], interpret: bool
) -> tuple[jax.Array, jax.Array]:
    count, chunk, kv_heads, per_kv, head_dim = rows.q_rckqh.shape
    pool = write_pages(pool, rows, interpret)
    # The kernel wants rows end to end and no empty one. So all tokens count, dead ones too: being last in their rows,
    # no live token sees them. An idle row attends to the start of its table.
    before = jnp.where(rows.counts_r > 0, rows.starts_r, 0)
    work = attention_cost(rows, pool, blocks["num_queries_per_block"] or 1, rules.window)
    with simulated(interpret), costs(*work):
        mixed = ragged_paged_attention(
            widen(rows.q_rckqh).reshape(count * chunk, kv_heads * per_kv, -1),
            pool,
            (before + chunk).astype(jnp.int32),
            rows.page_table_rw,
            jnp.arange(count + 1, dtype=jnp.int32) * chunk,
            jnp.full((1,), count, jnp.int32),
            sm_scale=rules.scale_of(head_dim),
            sliding_window=rules.window,
            soft_cap=rules.soft_cap,
            **blocks,
        )
    return rows.zero_padding(mixed.reshape(count, chunk, kv_heads, per_kv, -1)[..., :head_dim]), pool


def attention_cost(rows: PagedRows, pool: jax.Array, queries_per_block: int, window: int | None) -> KernelCost:
    """Return the work of the attention kernel on one device, for `mesh.cost`.

    Single tokens are drawn at the end of the longest sequences, whose table is full of pages; chunks begin their
    sequences. A block of queries reads all keys and values of each row that has queries in it, and multiplies them with
    all queries of the block.
    """
    count, chunk, kv_heads, per_kv, _ = rows.q_rckqh.shape
    _, page_size, lines, width = pool.shape
    longest = rows.page_table_rw.shape[1] * page_size
    keys = min(chunk, longest) if chunk > 1 else min(longest, window or longest)
    reads = count * -(-chunk // queries_per_block)  # reads of a row's keys and values
    mixed = 2 * count * chunk * kv_heads * per_kv * width  # queries and results
    return KernelCost(
        flops=4 * reads * queries_per_block * kv_heads * per_kv * keys * width,
        bytes=(reads * keys * lines * width + mixed) * pool.dtype.itemsize,
    )
