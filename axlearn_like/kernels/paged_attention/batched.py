"""Attention over a paged cache by tokamax's batched ragged paged attention: several rows a step of the kernel.

Its layout of pages is that of `pages.make_pool`, so the two kernels can take turns on one pool. It can
write new tokens too, but wants every row to have some, and pages of idle rows must stay as they are; so our page writer
runs first, and this kernel reads everything from the pages. JAX's simulations of TPUs cannot run it (jax 0.12.0.1), so
its values are checked on the chip alone, by an engine's self-test.

Shape letters: as in rows.py.
"""

import functools
from importlib.util import find_spec

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.block_sizes import BlockSizes
from axlearn_like.kernels.paged_attention.pages import write_pages
from axlearn_like.kernels.paged_attention.ragged import attention_cost
from axlearn_like.kernels.paged_attention.rows import PagedRows, check_rules, check_table, on_own_heads, widen
from axlearn_like.kernels.paged_attention.tokamax_internals import block_sizes, ragged_paged_attention
from mesh.cost.expected import costs
from mesh.errors import UserError

BUFFERS = 3  # buffers of keys and of queries: two load while one is used, tokamax's own choice
QUERIES_AT_ONCE = 64  # queries of a chunk's block multiplied at a time
CHUNK_ROWS = 2  # rows of a step, in chunks


def require_tokamax() -> None:
    """Refuse the kernel where its package is missing (UserError)."""
    if find_spec("tokamax") is None:
        raise UserError('kernel.name="batched" needs the package tokamax: install the extra `tpu`, or use "ragged"')


def batched_attention(
    rows: PagedRows, pool: jax.Array, *, rules: ScoreRules, sinks: bool, sizes: BlockSizes
) -> tuple[jax.Array, jax.Array]:
    """Write the new keys and values of each row into its pages, then attend; arguments as of `ragged_attention`.

    Of the sizes, `row_queries` are the rows of a step of decoding.

    Raises:
        UserError: the page table is too large, or the kernel does not support the rules.
    """
    check_rules(rules, sinks)
    check_table(rows, pool.shape[1])
    return on_own_heads(functools.partial(_on_one_device, rules=rules, sizes=sizes), rows, pool)


def _on_one_device(
    rows: PagedRows, pool: jax.Array, *, rules: ScoreRules, sizes: BlockSizes
) -> tuple[jax.Array, jax.Array]:
    count, chunk, kv_heads, per_kv, head_dim = rows.q_rckqh.shape
    pool = write_pages(pool, rows, interpret=False)
    # As for the other kernel all tokens count, dead ones too. Those behind a row's table see any page, and no one sees
    # them.
    ends = jnp.where(rows.counts_r > 0, rows.starts_r, 0) + chunk
    # Rows that decode, rows with chunks alone, all rows; "mixed" ones may have any number of new tokens.
    kinds = jnp.array([count] * 3 if chunk == 1 else [0, 0, count], jnp.int32)
    block = functools.partial(block_sizes, n_buffer=BUFFERS)
    queries = min(QUERIES_AT_ONCE, sizes.chunk_queries)
    work = attention_cost(rows, pool, sizes.row_queries, rules.window)

    def flat(x: jax.Array) -> jax.Array:
        return widen(x).reshape(count * chunk, -1, pool.shape[-1]).astype(pool.dtype)

    with costs(*work):
        mixed, pool = ragged_paged_attention(
            *map(flat, rows[:3]),
            pool,
            ends.astype(jnp.int32),
            rows.page_table_rw.reshape(-1).astype(jnp.int32),
            jnp.arange(count + 1, dtype=jnp.int32) * chunk,
            kinds,
            sm_scale=rules.scale_of(head_dim),
            sliding_window=rules.window,
            soft_cap=rules.soft_cap,
            decode_block_sizes=block(bq_sz=1, bq_c_sz=1, bkv_sz=sizes.row_keys, batch_size=sizes.row_queries),
            prefill_block_sizes=block(
                bq_sz=sizes.chunk_queries, bq_c_sz=queries, bkv_sz=sizes.chunk_keys, batch_size=CHUNK_ROWS
            ),
            vmem_limit_bytes=sizes.vmem_bytes,
            skip_kv_update=True,
        )
    mixed = mixed.reshape(count, chunk, kv_heads, per_kv, -1)[..., :head_dim]
    return rows.zero_padding(mixed).astype(rows.q_rckqh.dtype), pool
