"""Grouped products in fixed tiles: a row's bits depend on that row and its group's matrix alone.

Pairs of a group and a tile of `ROWS` rows that holds some of the group's are visited in order
(stacked_grouped_matmul.py), each multiplied as in matmul.py, whole tiles at a time: where a row stands, and whose rows
stand beside it, changes nothing. The depth may be one of equal parts, whose sums are then added by a tree (parts.py).
"""

from typing import Any

import jax
from jax.typing import DTypeLike

from axlearn_like.kernels.exact.matmul import ROWS, columns_of_block, product_of_part
from axlearn_like.kernels.stacked_grouped_matmul import VisitPlan, is_turned, product_by_visits


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
