"""Grouped products in fixed tiles: a row's bits depend on that row and its group's matrix alone.

Pairs of a group and a tile of `ROWS` rows that holds some of the group's are visited in order
(stacked_grouped_matmul.py), each multiplied as in matmul.py, whole tiles at a time: where a row stands, and whose rows
stand beside it, changes nothing. The depth may be one of equal parts, whose sums are then added by a tree (parts.py).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from axlearn_like.kernels.exact.matmul import ROWS, columns_of_block, product_of_part
from axlearn_like.kernels.stacked_grouped_matmul import is_turned, plan_visits
from mesh.cost.expected import costs

_VMEM = 56 << 20  # bytes of fast memory that the kernel may use


def exact_grouped_matmul(
    x_ri: jax.Array,
    stack_lgio: jax.Array,
    sizes: jax.Array,
    layer: jax.Array | int = 0,
    *,
    part: int = 0,
    parts: int = 1,
    dtype: DTypeLike | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return rows times the matrices of their groups, [r, o], on one device.

    Args:
        x_ri: [rows, in / parts], sorted by group: that part of the depth. float32 (multiplied exactly) or bfloat16.
        stack_lgio: [layers, groups, in, out], of the type of x, read in place.
        sizes: int32 [groups], rows of each group; rows behind all of them have an undefined result.
        layer: the layer's place in the stack.
        part: which part of the depth is multiplied.
        parts: parts of the depth.
        dtype: dtype of the result; None: that of x.
        interpret: simulate a TPU, which is slow.
    """
    rows, depth = x_ri.shape
    groups, columns = stack_lgio.shape[1], stack_lgio.shape[3]
    assert depth * parts == stack_lgio.shape[2]
    x_ri = jnp.pad(x_ri, [(0, -rows % ROWS), (0, 0)])
    visits = plan_visits(sizes, len(x_ri), ROWS)
    block = columns_of_block(depth, stack_lgio.dtype.itemsize)
    if turned := parts == 1 and is_turned(depth, columns):  # as the device holds it: the other form would be a copy
        stack_lgio = jnp.swapaxes(stack_lgio, 2, 3)
        matrix = pl.BlockSpec((None, None, block, depth), lambda o, v, layer, group, *_: (layer[0], group[v], o, 0))
    else:
        shape = (None, None, depth, block)
        matrix = pl.BlockSpec(shape, lambda o, v, layer, group, *_: (layer[0], group[v], part, o))
    product = pl.pallas_call(
        functools.partial(_kernel, turned=turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(columns, block), visits.used),
            in_specs=[
                pl.BlockSpec((ROWS, depth), lambda o, v, layer, group, tile, *_: (tile[v], 0)),
                matrix,
            ],
            out_specs=pl.BlockSpec((ROWS, block), lambda o, v, layer, group, tile, *_: (tile[v], o)),
        ),
        out_shape=jax.ShapeDtypeStruct((len(x_ri), columns), jnp.dtype(dtype or x_ri.dtype)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM),
        interpret=interpret,
        name="exact_grouped_matmul",
    )
    read = min(groups, rows) * depth * columns + len(x_ri) * depth * pl.cdiv(columns, block)
    with costs(flops=2 * rows * depth * columns, bytes=read * x_ri.dtype.itemsize):
        numbers = functools.partial(jnp.asarray, dtype=jnp.int32)
        return product(numbers(layer)[None], *map(numbers, visits[:4]), x_ri, stack_lgio)[:rows]


def _kernel(
    layer: Any, group: Any, tile: Any, start: Any, end: Any, x: Any, matrix: Any, out: Any, *, turned: bool
) -> None:
    """Multiply a tile of rows with one block of the columns of a group, and keep the rows that are the group's."""
    del layer, group
    visit = pl.program_id(1)
    product = product_of_part(x, matrix, 0, x.shape[1], table=turned)
    row = tile[visit] * x.shape[0] + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
    own = (row >= start[visit]) & (row < end[visit])
    out[...] = jnp.where(own, product, out[...].astype(jnp.float32)).astype(out.dtype)
