"""Items of the kernels of paged attention: a step of the grid has some queries, whose keys come in blocks of pages.

Shape letters: i items, n queries of an item and key/value head; others as in rows.py.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.rows import widen
from axlearn_like.kernels.paged_attention.simulation import simulated
from axlearn_like.kernels.paged_attention.softmax_blocks import BlockSoftmax, in_eights
from mesh.cost.expected import KernelCost, costs


@dataclasses.dataclass(frozen=True)
class ItemPlan:
    """Facts about all items that are known when the kernel is traced."""

    rules: ScoreRules  # masks and score transformations
    scale: float  # scale of the scores
    block: int  # pages of a block
    per_head: int = 1  # query heads of a key/value head


@dataclasses.dataclass(frozen=True)
class ItemCall:
    """A call of a kernel: its name, work and limit of vector memory (None: the compiler's), and if it is simulated."""

    name: str
    work: KernelCost
    vmem_bytes: int | None = None
    interpret: bool = False


def attend_in_items(
    attend: Callable[..., jax.Array], q_rckqh: jax.Array, starts_r: jax.Array, counts_r: jax.Array, queries: int
) -> jax.Array:
    """Return attention of rows, [r, c, k, q, h], whose tokens are cut into items.

    Args:
        attend: function of queries [i, k, n, h], n a multiple of 8, and of the positions, int32 [i], of an item's first
            token and behind its last one (0: none is live). As many items of each row, one row after the other.
        starts_r: int32, position of a row's first token.
        counts_r: int32, live tokens of a row.
        queries: most queries of an item, over all heads that share a key/value head.
    """
    count, chunk, heads, per_head, head_dim = q_rckqh.shape
    tokens = max(1, queries // per_head)
    parts = -(-chunk // tokens)
    q = jnp.pad(q_rckqh, [(0, 0), (0, parts * tokens - chunk)] + [(0, 0)] * 3)
    q = widen(q).reshape(count * parts, tokens, heads, per_head, -1).transpose(0, 2, 1, 3, 4)
    before, starts, counts = jnp.arange(parts) * tokens, starts_r[:, None], counts_r[:, None]
    ends = jnp.where(counts > before, starts + jnp.minimum(before + tokens, counts), 0)
    q = in_eights(q.reshape(count * parts, heads, tokens * per_head, -1))
    mixed = attend(q, (starts + before).reshape(-1), ends.reshape(-1))[:, :, : tokens * per_head]
    mixed = mixed.reshape(count, parts, heads, tokens, per_head, -1).transpose(0, 1, 3, 2, 4, 5)
    return mixed.reshape(count, parts * tokens, heads, per_head, -1)[:, :chunk, ..., :head_dim]


def run_items(
    kernel: Callable[..., None],
    numbers: Sequence[jax.Array],
    q_iknh: jax.Array,
    pools: Sequence[tuple[jax.Array, tuple[int, ...]]],
    out: Any,
    call: ItemCall,
) -> Any:
    """Return the results of a kernel over a grid of items.

    Args:
        kernel: function of references: numbers, queries of an item, pools, results of an item, buffers, the state of a
            `BlockSoftmax`, and a semaphore for each slot of the buffers.
        numbers: tables and positions, whole in scalar memory.
        pools: arrays that stay where they are, each with the shape of its buffer, two slots for a block of pages.
        out: shapes of the results [i, k, n, ...].
    """
    items, heads, queries, width = q_iknh.shape

    def of_item(like: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, queries, like.shape[-1]), lambda i, *_: (i, 0, 0, 0))

    with simulated(call.interpret), costs(*call.work):
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(numbers),
                grid=(items,),
                in_specs=[of_item(q_iknh), *[pl.BlockSpec(memory_space=pl.ANY)] * len(pools)],
                out_specs=jax.tree.map(of_item, out),
                scratch_shapes=[
                    *(pltpu.VMEM(shape, pool.dtype) for pool, shape in pools),
                    *BlockSoftmax.scratch(heads, queries, width),
                    pltpu.SemaphoreType.DMA((2,)),
                ],
            ),
            out_shape=out,
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=call.vmem_bytes),
            name=call.name,
        )(*(x.astype(jnp.int32) for x in numbers), q_iknh, *(pool for pool, _ in pools))
