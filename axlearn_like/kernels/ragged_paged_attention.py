"""Attention over a paged cache on TPU: a kernel that writes new keys and values, then the attention kernel of JAX.

`jax.experimental.pallas.ops.tpu.ragged_paged_attention` ("Ragged Paged Attention", arXiv 2604.15464) reads pages but
does not write them, and a scatter by XLA goes token by token. So a small kernel of our own copies new tokens into their
pages, a whole page at a time where possible. Both work in place: a pool that is donated, or carried by a scan, is never
copied.

Shape letters: r rows, c tokens of a row, k key/value heads, q query heads per key/value head, h head width, w the
widest page table, p pages touched by a row's new tokens.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.typing import DTypeLike

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.block_sizes import BlockSizes
from mesh.cost.expected import KernelCost, costs
from mesh.errors import UserError
from mesh.rules import axis_sizes, constrain, partition

PLAIN, DEFAULT = ScoreRules(), BlockSizes()
LANES = 128  # the width of a TPU register: narrower heads are padded to it
TABLE_BYTES = 15 << 16  # limit of a page table: it is stored in scalar memory, 1 MiB on all TPUs, with little else


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
    shape = (num_layers * pages, page_size, 2 * kv_heads, _padded(head_dim))
    return jnp.zeros(shape, dtype, out_sharding=partition(None, None, "heads", None))


def paged_attention_tpu(
    q_rckqh: jax.Array,
    k_rckh: jax.Array,
    v_rckh: jax.Array,
    pool: jax.Array,
    *,
    page_table_rw: jax.Array,
    starts_r: jax.Array,
    counts_r: jax.Array,
    rules: ScoreRules = PLAIN,
    sinks: bool = False,
    sizes: BlockSizes = DEFAULT,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Write the new keys and values of each row into its pages, then attend to all up to and including each token.

    A row is a chunk of one sequence, right-padded. No two rows may write to the same page. Softmax in float32.
    Under a mesh every device works on its own heads, and on all rows.

    Args:
        q_rckqh: queries, rotated; the type of the pool.
        k_rckh: keys, rotated.
        v_rckh: values.
        pool: from `make_pool`.
        page_table_rw: int32, the index in the pool (the layer's offset included) of each page of a row's sequence.
            Unused entries may be any page; it is read and ignored, so use the layer's page 0.
        starts_r: int32, tokens of the sequence that are already in its pages; the row's first token has this position.
        counts_r: int32, live tokens of the row; 0 for an idle one.
        rules: of attention; it is causal.
        sinks: heads have sinks, which this kernel does not support.
        sizes: of blocks: those of rows where c is 1, else those of chunks.
        interpret: simulate a TPU, which is slow; for tests.

    Returns:
        The mixed values [r, c, k, q, h], zero where there is no live token, and the pool.

    Raises:
        UserError: the page table is too large, or the kernel does not support the rules.
    """
    check_rules(rules, sinks)
    rows, chunk = k_rckh.shape[:2]
    page_size, width = pool.shape[1], page_table_rw.shape[1]
    check_table(rows, width, page_size)
    keys, queries = (sizes.row_keys, sizes.row_queries) if chunk == 1 else (sizes.chunk_keys, sizes.chunk_queries)
    blocks = {
        "num_kv_pages_per_block": min(width, max(1, keys // page_size)),
        "num_queries_per_block": min(rows * chunk, queries),
        "vmem_limit_bytes": sizes.vmem_bytes,
    }
    body = functools.partial(_on_one_device, rules=rules, blocks=blocks, interpret=interpret)
    return on_own_heads(body, q_rckqh, k_rckh, v_rckh, pool, page_table_rw, starts_r, counts_r)


def on_own_heads[P](
    body: Callable[..., tuple[jax.Array, P]],
    q_rckqh: jax.Array,
    k_rckh: jax.Array,
    v_rckh: jax.Array,
    pool: P,
    *numbers: jax.Array,
) -> tuple[jax.Array, P]:
    """Return a body's mixed values and pool, computed under a mesh by every device for its own heads and all rows.

    `pool`: arrays whose heads, or lines of heads, are their last axis but one. `numbers`: integers of all devices.
    """
    args = (q_rckqh, k_rckh, v_rckh, pool, *numbers)
    if jax.sharding.get_abstract_mesh().empty:
        return body(*args)

    def of_heads(x: jax.Array) -> Any:
        return partition(*[None] * (x.ndim - 2), "heads", None)  # the pool is sharded as keys are

    queries = partition(None, None, "heads", None, None)
    specs = (queries, *jax.tree.map(of_heads, args[1:4]), *(partition(*[None] * x.ndim) for x in numbers))
    # Rows are gathered on every device: pages are not sharded over the axes that shard a batch.
    args = jax.tree.map(jax.sharding.reshard, args, specs)
    out_specs: Any = queries, specs[3]
    mixed, pool = jax.shard_map(body, in_specs=specs, out_specs=out_specs, check_vma=False)(*args)
    return constrain(mixed, "batch", None, "heads", None, None), pool


def _on_one_device(
    q_rckqh: jax.Array,
    k_rckh: jax.Array,
    v_rckh: jax.Array,
    pool: jax.Array,
    page_table_rw: jax.Array,
    starts_r: jax.Array,
    counts_r: jax.Array,
    *,
    rules: ScoreRules,
    blocks: dict[str, int | None],
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    rows, chunk, kv_heads, per_kv, head_dim = q_rckqh.shape
    pool = write_pages(pool, k_rckh, v_rckh, page_table_rw, starts_r, counts_r, interpret)
    # The kernel wants rows end to end and no empty one. So all tokens count, dead ones too: being last in their rows,
    # no live token sees them. An idle row attends to the start of its table.
    before = jnp.where(counts_r > 0, starts_r, 0)
    block = blocks["num_queries_per_block"] or 1
    work = attention_cost(q_rckqh.shape, pool, page_table_rw.shape[1], block, rules.window)
    with simulated(interpret), costs(*work):
        mixed = ragged_paged_attention(
            widen(q_rckqh).reshape(rows * chunk, kv_heads * per_kv, -1),
            pool,
            (before + chunk).astype(jnp.int32),
            page_table_rw,
            jnp.arange(rows + 1, dtype=jnp.int32) * chunk,
            jnp.full((1,), rows, jnp.int32),
            sm_scale=rules.scale_of(head_dim),
            sliding_window=rules.window,
            soft_cap=rules.soft_cap,
            **blocks,
        )
    mixed = mixed.reshape(rows, chunk, kv_heads, per_kv, -1)[..., :head_dim]
    live = jnp.arange(chunk) < counts_r[:, None]
    return jnp.where(live[:, :, None, None, None], mixed, 0), pool


def attention_cost(
    queries_rckqh: tuple[int, ...], pool: jax.Array, pages: int, queries_per_block: int, window: int | None
) -> KernelCost:
    """Return the work of the attention kernel on one device, for `mesh.cost`.

    Single tokens are drawn at the end of the longest sequences, whose table is full of pages; chunks begin their
    sequences. A block of queries reads all keys and values of each row that has queries in it, and multiplies them with
    all queries of the block.
    """
    rows, chunk, kv_heads, per_kv, _ = queries_rckqh
    _, page_size, lines, width = pool.shape
    longest = pages * page_size
    keys = min(chunk, longest) if chunk > 1 else min(longest, window or longest)
    reads = rows * -(-chunk // queries_per_block)  # of the keys and values of a row
    mixed = 2 * rows * chunk * kv_heads * per_kv * width  # queries and results
    return KernelCost(
        flops=4 * reads * queries_per_block * kv_heads * per_kv * keys * width,
        bytes=(reads * keys * lines * width + mixed) * pool.dtype.itemsize,
    )


def write_pages(
    pool: jax.Array,
    k_rckh: jax.Array,
    v_rckh: jax.Array,
    page_table_rw: jax.Array,
    starts_r: jax.Array,
    counts_r: jax.Array,
    interpret: bool,
) -> jax.Array:
    """Return the pool with the live new tokens (keys and values interleaved) in their pages; on one device."""
    rows, chunk, kv_heads, head_dim = k_rckh.shape
    new_rcjh = jnp.stack([k_rckh, v_rckh], axis=3).reshape(rows, chunk, 2 * kv_heads, head_dim)
    new_rcjh = widen(new_rcjh).astype(pool.dtype)
    pages = touched_pages(page_table_rw, starts_r, chunk, pool.shape[1])
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
        )(pages.astype(jnp.int32), starts_r.astype(jnp.int32), counts_r.astype(jnp.int32), new_rcjh, pool)


def touched_pages(page_table_rw: jax.Array, starts_r: jax.Array, chunk: int, page_size: int) -> jax.Array:
    """Return the pages that a row's chunk of tokens may lie in, [r, p]."""
    touched = (chunk + page_size - 2) // page_size + 1
    index = starts_r[:, None] // page_size + jnp.arange(touched)
    # Past the end of the table there is no live token, and the page is not used.
    return jnp.take_along_axis(page_table_rw, jnp.minimum(index, page_table_rw.shape[1] - 1), axis=1)


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


@contextlib.contextmanager
def simulated(interpret: bool) -> Iterator[None]:
    """Run Pallas kernels by the interpreter in this block; the attention kernel has no switch of its own for it."""
    if not interpret:
        yield
        return
    # Needed for jax 0.12: the interpreter asks constant indices for their shape, and integer literals have none.
    from jax._src.literals import TypedInt

    setattr(TypedInt, "shape", ())  # noqa: B010
    with pltpu.force_tpu_interpret_mode(cast(Any, True)):  # simulated memories (InterpretParams) lack reshaped views
        yield


def widen(x: jax.Array) -> jax.Array:
    """Return x padded with zeros to the width of a head in the pool."""
    missing = _padded(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _padded(head_dim: int) -> int:
    return -(-head_dim // LANES) * LANES


def check_rules(rules: ScoreRules, sinks: bool) -> None:
    """Refuse rules that the kernel does not support.

    Raises:
        UserError: sinks or attention that is not causal.
    """
    if sinks:
        raise UserError(
            "Attention.sinks: the TPU kernel of paged attention does not support sinks; expected sinks=False"
        )
    if not rules.causal:
        raise UserError("Attention.causal=False is not supported with a cache; expected causal attention")


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


def check_table(rows: int, width: int, page_size: int) -> None:
    """Refuse a page table that does not fit into scalar memory (UserError)."""
    size = rows * (width + -width % LANES) * 4
    if size > TABLE_BYTES:
        pages = TABLE_BYTES // (rows * LANES * 4) * LANES
        raise UserError(
            f"paged attention: a table of {rows} rows x {width} pages of {page_size} tokens takes {size} bytes of the "
            f"TPU's scalar memory; expected at most {TABLE_BYTES}: {pages} pages a row, or fewer rows, or larger pages"
        )
