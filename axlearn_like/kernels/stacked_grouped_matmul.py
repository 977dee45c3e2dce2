"""The grouped matrix product with a layer's matrices where they are, in the stack of all layers; for TPUs.

Decoding scans over layers and multiplies few rows with many matrices, so it is bound by the reading of these. XLA's
grouped product (`jax.lax.ragged_dot`) is a kernel, which cannot read a slice of an array: the matrices of a layer
are first copied out of their stack, and moved three times instead of once. Here the layer's index is an input of the
kernel. Pairs of a group and a tile of its rows are visited in order, as in Megablox (Gale et al. 2022, arXiv
2211.15841, 5), so a matrix is read once however many tiles its rows are in; a group without rows is not visited.

Matrices of int8 numbers with a scale for each column are read as they are: numbers become floats in fast memory, and a
product is multiplied by the scales, in float32.

A device holds a matrix whose width is no multiple of 128 as its transpose, where that takes less memory. The kernel
reads either form: another one would be a copy of the stack, and a fraction of each row filled with nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from axlearn_like.kernels.quantised_matmul import has_columns
from mesh.cost.expected import costs

if TYPE_CHECKING:
    from qwix import QArray

_LANES = 128
_SUBLANES = {1: 32, 2: 16, 4: 16}  # bytes of a number -> sublanes
_MOST_ROWS = 128  # limit of a tile's rows
_BLOCK_BYTES = 4 << 20  # bytes of a matrix block in fast memory, which holds two at a time
_VMEM = 48 << 20  # bytes of fast memory that the kernel may use


class Visits(NamedTuple):
    """The pairs of a group and a tile that holds rows of it, int32 [visits] each; the first `used` are in use."""

    group: jax.Array  # the group
    tile: jax.Array  # the tile of rows
    start: jax.Array  # the group's first row
    end: jax.Array  # the row behind its last one
    used: jax.Array  # int32 [], at least 1: without rows the first visit has none, so no grid is empty


def plan_visits(sizes: jax.Array, rows: int, tile: int) -> Visits:
    """Return the visits for sorted rows: the first sizes[0] belong to group 0 and so on; sum(sizes) may be less.

    Args:
        sizes: int32 [groups].
        rows: rows of all tiles, a multiple of `tile`.
    """
    groups = len(sizes)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first = starts // tile
    count = jnp.where(sizes > 0, (ends - 1) // tile - first + 1, 0)
    behind = jnp.cumsum(count)
    number = jnp.arange(rows // tile + min(groups, rows) - 1)[:, None]
    # Sums over the groups instead of gathers: all of it is a few fused operations.
    mine = (number >= behind - count) & (number < behind)

    def of_group(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mine, values, 0), axis=1, dtype=jnp.int32)

    tiles = of_group(first - (behind - count) + number)
    return Visits(of_group(jnp.arange(groups)), tiles, of_group(starts), of_group(ends), jnp.maximum(behind[-1], 1))


def stacked_product(
    x_ri: jax.Array,
    stack_lgio: "jax.Array | QArray",
    layer: jax.Array | int,
    sizes: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return x times the matrices of a layer: [rows, out] of the type of x; without a gradient.

    Args:
        x_ri: [rows, in], sorted by group; float32 (multiplied exactly) or bfloat16.
        stack_lgio: [layers, groups, in, out], of the type of x; or int8 with scales [layers, groups, 1, out].
        layer: int32, index of the layer.
        sizes: int32 [groups], rows of each group; rows behind all of them have an undefined result.
    """
    (rows, depth), groups, columns = x_ri.shape, *stack_lgio.shape[1::2]
    held: Any
    held, scale = (stack_lgio.qvalue, stack_lgio.scale) if has_columns(stack_lgio) else (stack_lgio, None)
    return product_by_visits(
        _multiply,
        x_ri,
        held,
        layer,
        sizes,
        VisitPlan(
            name="stacked_grouped_matmul" if scale is None else "stacked_grouped_int8_matmul",
            tile=rows_of_tile(rows, groups),
            width=_columns_of_block(columns, depth * held.dtype.itemsize),
            turned=is_turned(depth, columns, held.dtype.itemsize),
            interpret=pltpu.InterpretParams(uninitialized_memory="nan") if interpret else False,
        ),
        scale=scale,
    )


@dataclasses.dataclass(frozen=True)
class VisitPlan:
    """How a kernel goes through groups and tiles."""

    name: str  # name of the kernel
    tile: int  # rows of a tile
    width: int  # columns of a block
    turned: bool  # matrices are read as their transposes, the form in which the device holds them
    part: int = 0  # number of the part of the matrices' depth that the rows are
    interpret: Any = False  # simulation of a TPU; False: none


def product_by_visits(
    multiply: Callable[..., jax.Array],
    x_ri: jax.Array,
    stack_lgio: jax.Array,
    layer: jax.Array | int,
    sizes: jax.Array,
    plan: VisitPlan,
    *,
    dtype: DTypeLike | None = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    """Return rows times the matrices of their groups by a kernel that visits each pair of a group and a tile.

    Args:
        multiply: function of references to a tile and to a block of a matrix, and of `turned`: their float32 product.
        x_ri: as in `stacked_product`; its depth may be that of one of equal parts of the matrices'.
        plan: tiles, blocks and the form of the matrices.
        dtype: dtype of the result; None: that of x.
        scale: float32 [layers, groups, 1, out], factors of the columns of products; None: there are none.
    """
    rows, depth = x_ri.shape
    _, groups, _, columns = stack_lgio.shape
    tile, width, part, turned = plan.tile, plan.width, plan.part, plan.turned
    x_ri = jnp.pad(x_ri, [(0, -rows % tile), (0, 0)])
    visits = plan_visits(sizes, len(x_ri), tile)
    if turned:
        stack_lgio = jnp.swapaxes(stack_lgio, 2, 3)
        block = pl.BlockSpec((None, None, width, depth), lambda o, v, layer, group, *_: (layer[0], group[v], o, part))
    else:
        block = pl.BlockSpec((None, None, depth, width), lambda o, v, layer, group, *_: (layer[0], group[v], part, o))
    stacks, blocks = [stack_lgio], [block]
    if scale is not None:
        stacks.append(scale)
        blocks.append(pl.BlockSpec((None, None, 1, width), lambda o, v, layer, group, *_: (layer[0], group[v], 0, o)))
    if not plan.interpret:  # a stack that fits fast memory would be copied there, whole for each layer
        stacks = [pltpu.with_memory_space_constraint(stack, pltpu.HBM) for stack in stacks]
    kind = getattr(jax.typeof(x_ri), "manual_axis_type", None)  # said inside a shard_map, even if nothing varies
    product = pl.pallas_call(
        functools.partial(_kernel, multiply=multiply, turned=turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(columns, width), visits.used),
            in_specs=[pl.BlockSpec((tile, depth), lambda o, v, layer, group, tile, *_: (tile[v], 0)), *blocks],
            out_specs=pl.BlockSpec((tile, width), lambda o, v, layer, group, tile, *_: (tile[v], o)),
        ),
        out_shape=jax.ShapeDtypeStruct((len(x_ri), columns), jnp.dtype(dtype or x_ri.dtype), manual_axis_type=kind),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM),
        interpret=plan.interpret,
        name=plan.name,
    )
    read = min(groups, rows) * depth * columns * stack_lgio.dtype.itemsize
    read += len(x_ri) * (depth * pl.cdiv(columns, width) + columns) * x_ri.dtype.itemsize
    with costs(flops=2 * rows * depth * columns, bytes=read):
        return product(jnp.asarray(layer, jnp.int32)[None], *visits[:4], x_ri, *stacks)[:rows]


def rows_of_tile(rows: int, groups: int) -> int:
    """Return the rows of a tile, a power of two: about as many as a group has twice over, if all have the same."""
    wanted = 2 * rows // groups
    return min(_MOST_ROWS, max(_SUBLANES[2], 1 << max(0, wanted - 1).bit_length()))


def is_turned(depth: int, columns: int, size: int = 2) -> bool:
    """Return True where TPUs hold [..., depth, columns] transposed: they choose the order with less padding.

    `size`: bytes of a number.
    """
    return _numbers_held(columns, depth, size) < _numbers_held(depth, columns, size)


def _numbers_held(above: int, beside: int, size: int) -> int:
    return -(-above // _SUBLANES[size]) * _SUBLANES[size] * -(-beside // _LANES) * _LANES


def _columns_of_block(columns: int, size: int) -> int:
    """Return the columns of a block of so many bytes a column: all, or a multiple of 128 so that each core has some."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    cores = (device.num_cores if device is not None else None) or 1
    share = -(-columns // (cores * _LANES)) * _LANES
    return min(columns, share, max(_LANES, _BLOCK_BYTES // size // _LANES * _LANES))


def _multiply(x: Any, matrix: Any, *, turned: bool) -> jax.Array:
    exact = x.dtype == jnp.float32
    return jax.lax.dot_general(
        x[...],
        matrix[...].astype(x.dtype),
        (((1,), (1 if turned else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _kernel(*refs: Any, multiply: Callable[..., jax.Array], turned: bool) -> None:
    """Multiply one tile of rows with a block of one group's matrix, and keep the rows that are the group's."""
    _, _, tile, start, end, x, matrix, *scale, out = refs
    visit = pl.program_id(1)
    product = multiply(x, matrix, turned=turned)
    for factors in scale:
        product = product * factors[...]
    row = tile[visit] * x.shape[0] + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
    own = (row >= start[visit]) & (row < end[visit])
    out[...] = jnp.where(own, product, out[...].astype(jnp.float32)).astype(out.dtype)
