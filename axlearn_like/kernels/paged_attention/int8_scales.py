"""Pages of int8 on TPUs: an empty pool of numbers and scales, and what writes new tokens, rounded, into it.

Each token and head has a scale of its own (int8_heads.py), stored beside the pages: for each page and head a row of the
keys' scales and the values' behind them, 128 numbers for 64 tokens, as wide as a register. New numbers are written by
`write_pages`, new scales into copies of their pages' rows, which go back whole.

Shape letters: p pages touched by a row's new tokens, g all of these, l = 2 * page size lanes of scales; others as in
rows.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.int8_heads import round_heads
from axlearn_like.kernels.paged_attention.pages import make_pool, touched_pages, write_pages
from axlearn_like.kernels.paged_attention.rows import PagedRows
from axlearn_like.kernels.paged_attention.simulation import simulated
from mesh.cost.expected import costs
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
