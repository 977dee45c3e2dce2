"""Pages of keys and values on TPUs: an empty pool, and the kernel that writes new tokens into their pages.

A scatter by XLA goes token by token. The kernel copies a whole page at a time where possible, and works in place: a
pool that is donated, or carried by a scan, is never copied.

Shape letters: p pages touched by a row's new tokens; others as in rows.py.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from axlearn_like.kernels.paged_attention.rows import PagedRows, padded, widen
from axlearn_like.kernels.paged_attention.simulation import simulated
from mesh.cost.expected import costs
from mesh.errors import UserError
from mesh.rules import axis_sizes, partition


def make_pool(
    num_layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: DTypeLike = jnp.bfloat16
) -> jax.Array:
    """Return an empty pool for all layers, [num_layers * pages, page_size, 2 * kv_heads, head width], sharded by heads.

    Page i of layer l is at index l * pages + i. Head j's keys are at 2 * j of the third axis, its values at 2 * j + 1.
    The head width is `head_dim`, rounded up to 128.

    Raises:
        UserError: the kernel cannot lay out that many heads on one device.
    """
    _check_heads(kv_heads, jnp.dtype(dtype))
    shape = (num_layers * pages, page_size, 2 * kv_heads, padded(head_dim))
    return jnp.zeros(shape, dtype, out_sharding=partition(None, None, "heads", None))


def _check_heads(kv_heads: int, dtype: jnp.dtype) -> None:
    """Refuse heads that the attention kernel cannot pack: registers are 8 rows of 4 bytes, and counts powers of two."""
    shards = math.prod(axis_sizes("heads").values())
    if kv_heads % shards:
        raise UserError(f"paged attention: {kv_heads} key/value heads do not divide over {shards} devices")
    lines, rest = divmod(2 * kv_heads // shards * dtype.itemsize, 4)
    if rest or not (lines in (1, 2, 4) or lines % 8 == 0):
        raise UserError(
            f"paged attention: the TPU kernel cannot lay out {kv_heads // shards} key/value heads per device in "
            f"{dtype}; expected {'2, 4, 8 or a multiple of 16' if dtype == jnp.int8 else '1, 2, 4 or a multiple of 8'}"
        )


def write_pages(pool: jax.Array, rows: PagedRows, interpret: bool) -> jax.Array:
    """Return the pool with the live new tokens (keys and values interleaved) in their pages; on one device."""
    count, chunk, kv_heads, head_dim = rows.k_rckh.shape
    new_rcjh = jnp.stack([rows.k_rckh, rows.v_rckh], axis=3).reshape(count, chunk, 2 * kv_heads, head_dim)
    new_rcjh = widen(new_rcjh).astype(pool.dtype)
    numbers = (touched_pages(rows, pool.shape[1]), rows.starts_r, rows.counts_r)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    with simulated(interpret), costs(flops=0, bytes=2 * new_rcjh.size * new_rcjh.dtype.itemsize):
        return pl.pallas_call(
            _write_kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(1,),
                in_specs=[hbm, hbm],
                out_specs=hbm,
                scratch_shapes=[pltpu.SemaphoreType.DMA],
            ),
            out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            input_output_aliases={4: 0},
            name="write_pages",
        )(*(x.astype(jnp.int32) for x in numbers), new_rcjh, pool)


def touched_pages(rows: PagedRows, page_size: int) -> jax.Array:
    """Return the pages that each row's chunk of tokens may lie in, [r, p]."""
    touched = (rows.k_rckh.shape[1] + page_size - 2) // page_size + 1
    index = rows.starts_r[:, None] // page_size + jnp.arange(touched)
    # Past the end of the table there is no live token, and the page is not used.
    return jnp.take_along_axis(rows.page_table_rw, jnp.minimum(index, rows.page_table_rw.shape[1] - 1), axis=1)


def _write_kernel(
    pages_rp: Any, starts_r: Any, counts_r: Any, new_rcjh: Any, _: Any, pool: Any, semaphore: Any
) -> None:
    """Start the copies of all rows, then wait for all of them."""
    (rows, chunk), page_size = new_rcjh.shape[:2], pool.shape[1]

    def copy(row: jax.Array, token: jax.Array, page: jax.Array, slot: jax.Array, size: int) -> Any:
        source, target = new_rcjh.at[row, pl.ds(token, size)], pool.at[page, pl.ds(slot, size)]
        return pltpu.make_async_copy(source, target, semaphore)

    def all_copies(act: Any) -> None:
        @pl.loop(0, rows)
        def _row(row: jax.Array) -> None:
            start, count = starts_r[row], counts_r[row]
            first_slot = start % page_size

            @pl.loop(0, (first_slot + count + page_size - 1) // page_size)
            def _page(index: jax.Array) -> None:
                page, offset = pages_rp[row, index], index * page_size - first_slot
                first, end = jnp.maximum(offset, 0), jnp.minimum(offset + page_size, count)
                if chunk >= page_size:
                    whole = end - first == page_size
                    end = jnp.where(whole, first, end)

                    @pl.when(whole)
                    def _() -> None:
                        act(copy(row, first, page, jnp.int32(0), page_size))

                @pl.loop(first, end)
                def _token(token: jax.Array) -> None:
                    act(copy(row, token, page, token - offset, 1))

    all_copies(lambda each: each.start())
    all_copies(lambda each: each.wait())
