"""The matrix product in fixed tiles: a row's bits depend on that row and the matrix alone.

A step of the kernel multiplies a tile of `ROWS` rows, whole in depth, with some columns, `DEPTH` of the depth at a time
in ascending order, summed in float32. All that the number of rows changes is how many steps there are, so one program
serves every batch. Columns are the outer axis of the grid: a block of the matrix is read once for all rows. Where a
mesh may cut the depth, it has equal parts, each summed so, whose sums are added by a tree (parts.py).

Few rows cost as much as `ROWS`: on TPUs a product with fewer is bound by the reading of the matrix anyway.

Grouped products: pairs of a group and a tile of `ROWS` rows that holds some of the group's are visited in order
(stacked_grouped_matmul.py), each multiplied as in `exact_matmul`, whole tiles at a time: where a row stands, and whose
rows stand beside it, changes nothing. The depth may be one of equal parts, whose sums are then added by a tree
(parts.py).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from axlearn_like.kernels.exact.parts import tree_sum
from axlearn_like.kernels.stacked_grouped_matmul import VisitPlan, is_turned, product_by_visits
from mesh.cost.expected import costs

ROWS = 128  # rows of a tile
DEPTH = 512  # entries of a row that are multiplied at a time
_BLOCK_BYTES = 4 << 20  # bytes of a matrix block in fast memory, which holds two at a time
_VMEM = 56 << 20  # bytes of fast memory that the kernel may use


def columns_of_block(depth: int, itemsize: int) -> int:
    """Return the columns of a block of the matrix, a multiple of 128 that does not depend on the rows."""
    most = _BLOCK_BYTES // (depth * itemsize) // 128 * 128
    return min(1024, max(128, most))


def exact_matmul(
    x_rd: jax.Array,
    weight: jax.Array,
    layer: jax.Array | int | None = None,
    *,
    parts: int = 1,
    dtype: DTypeLike | None = None,
    table: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Return x times a matrix, [r, o], on one device.

    Args:
        x_rd: float32 (multiplied exactly) or bfloat16.
        weight: [d, o], of the type of x; with `table` [o, d]. Or a stack of such matrices, which is read in place.
        layer: the matrix of the stack; None: there is no stack.
        parts: parts of the depth, a power of two; their sums are added by a tree.
        dtype: dtype of the result; None: that of x.
        table: the matrix is transposed, as a tied head is.
    """
    stack = weight[None] if layer is None else weight
    number = jnp.asarray(0 if layer is None else layer, jnp.int32)[None]
    rows, depth = x_rd.shape
    columns = stack.shape[1 if table else 2]
    dtype = jnp.dtype(dtype or x_rd.dtype)
    x_rd = jnp.pad(x_rd, [(0, -rows % ROWS), (0, 0)])
    block = columns_of_block(depth, weight.dtype.itemsize)
    if table:
        of_matrix = pl.BlockSpec((None, block, depth), lambda o, r, layer: (layer[0], o, 0))
    else:
        of_matrix = pl.BlockSpec((None, depth, block), lambda o, r, layer: (layer[0], 0, o))
    product = pl.pallas_call(
        functools.partial(_kernel, parts=parts, table=table),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(columns, block), len(x_rd) // ROWS),
            in_specs=[pl.BlockSpec((ROWS, depth), lambda o, r, layer: (r, 0)), of_matrix],
            out_specs=pl.BlockSpec((ROWS, block), lambda o, r, layer: (r, o)),
        ),
        out_shape=jax.ShapeDtypeStruct((len(x_rd), columns), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM),
        interpret=interpret,
        name="exact_matmul",
    )
    read = depth * columns + len(x_rd) * depth * pl.cdiv(columns, block)
    work = {"flops": 2 * len(x_rd) * depth * columns, "bytes": read * weight.dtype.itemsize}
    with costs(**work):
        return product(number, x_rd, stack)[:rows]


def _kernel(layer: Any, x: Any, matrix: Any, out: Any, *, parts: int, table: bool) -> None:
    """Multiply one tile of rows with one block of columns."""
    size = x.shape[1] // parts
    total = tree_sum(lambda part: product_of_part(x, matrix, part * size, size, table=table), parts)
    out[...] = total.astype(out.dtype)


def product_of_part(x: Any, matrix: Any, first: int, size: int, *, table: bool) -> jax.Array:
    """Return the product over `size` of the depth from `first` on, float32, `DEPTH` at a time in ascending order."""
    contracted = (((1,), (1 if table else 0,)), ((), ()))
    exact, columns = x.dtype == jnp.float32, matrix.shape[0 if table else 1]
    total = jnp.zeros((x.shape[0], columns), jnp.float32)
    for begin in range(first, first + size, DEPTH):
        some = pl.ds(begin, min(DEPTH, first + size - begin))
        total += jax.lax.dot_general(
            x[:, some],
            matrix[:, some] if table else matrix[some],
            contracted,
            precision=jax.lax.Precision.HIGHEST if exact else None,
            preferred_element_type=jnp.float32,
        )
    return total


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
        part: which part of the depth is multiplied.
        dtype: dtype of the result; None: that of x.
    """
    depth, columns = x_ri.shape[1], stack_lgio.shape[3]
    assert depth * parts == stack_lgio.shape[2]
    return product_by_visits(
        _multiply,
        x_ri,
        stack_lgio,
        layer,
        sizes,
        VisitPlan(
            name="exact_grouped_matmul",
            tile=ROWS,
            width=columns_of_block(depth, stack_lgio.dtype.itemsize),
            turned=parts == 1 and is_turned(depth, columns),
            part=part,
            interpret=interpret,
        ),
        dtype=dtype,
    )


def _multiply(x: Any, matrix: Any, *, turned: bool) -> jax.Array:
    return product_of_part(x, matrix, 0, x.shape[1], table=turned)
