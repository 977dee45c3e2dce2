"""The matrix product of all layers: weights with any number of input and output axes, as one flat matmul.

XLA's CPU backend runs [batch * length, in] x [in, out] about a quarter faster than the three-dimensional product; the
compilers of accelerators make no difference.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from axlearn_like.kernels.exact.parts import parts_of, sharing_axes, sum_over_devices
from axlearn_like.kernels.exact.scope import exact_kernels, refuse_exact
from axlearn_like.kernels.quantised_matmul import product_numbers, quantised_dot
from axlearn_like.layers.wrappers.low_rank.matrices import AddedProduct, FactorisedMatrix, RowAdapted
from axlearn_like.layers.wrappers.matrix_forms import ColumnParts, StackEntry, Transposed, Watched
from mesh.rules import axis_sizes, partition
from mesh.sharding import length_axes, varying

_BY_ROWS = (((1,), (1,)), ((), ()))  # last axes of both matrices
_TABLE_ROWS = 2048
ROWS_OF_ONE_ORDER = 64  # rows that make it sum its depth in one order; 128 for fewer than 16 columns
UNSPLIT_SUM = 32768  # entries of a matrix up to which XLA's CPU matmul sums its depth in one pass, however few the rows


def columns_at_once(depth: int, width: int) -> int | None:
    """Return how many columns of a matrix few rows are multiplied by at a time, on CPUs in float32; None: by all."""
    columns = UNSPLIT_SUM // depth // 64 * 64
    return columns if width % 64 == 0 and columns > 0 and width <= 16 * columns else None


def project(
    x: jax.Array,
    weight: Any,
    *,
    inputs: int = 1,
    in_axis: str | None = None,
    out_axis: str | None = None,
    out: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    like: jax.Array | None = None,
) -> jax.Array:
    """Contract the last `inputs` axes of x [batch, length, *in] with weight [*in, *out].

    Args:
        x: activations; the weight is cast to their type.
        weight: the first of its input and of its output axes may be sharded. Each row may have an update of its own
            (`RowAdapted`), or all rows one (`AddedProduct`). A `QArray` within `quantised_products`. Cut ahead of a
            loop over few rows: `ColumnParts`. Held as two factors: `FactorisedMatrix`. Stored as its transpose:
            `Transposed`.
        inputs: how many axes are contracted.
        in_axis: logical name of the first contracted axis *of the activations*, None if it is not sharded.
        out_axis: logical name of the first output axis, None if it is not sharded.
        out: output axes, if the weight has them merged into one.
        dtype: dtype of the result; that of x if not given. Sums are exact to float32 in any case on accelerators.
        like: an array whose sharding of batch and length the result gets; that of x if not given. Sums over devices
            are then scattered over them at once.

    Returns:
        [batch, length, *out].
    """
    batch, length = x.shape[:2]
    out = tuple(out or weight.shape[inputs:])
    if table := isinstance(weight, Transposed):
        weight = weight.stored.T
    axes: Any = {"in_axis": in_axis, "out_axis": out_axis}
    if isinstance(weight, AddedProduct | RowAdapted):
        refuse_exact("a matrix with a LoRA update")
    if isinstance(weight, Watched):
        weight.see(x)
        weight = weight.weight
    if isinstance(weight, FactorisedMatrix):
        low = project(x, weight.a, inputs=inputs, in_axis=in_axis)
        return project(low, weight.b, out_axis=out_axis, out=out, dtype=dtype, like=like)
    if isinstance(weight, AddedProduct):
        y = project(x, weight.weight, inputs=inputs, **axes, out=out, dtype=dtype, like=like)
        low = project(weight.dropped(x), weight.a, inputs=inputs, in_axis=in_axis)
        return y + project(low, weight.b, out_axis=out_axis, out=out, dtype=dtype, like=like)
    if isinstance(weight, RowAdapted):
        y = project(x, weight.weight, inputs=inputs, **axes, out=out, dtype=dtype, like=like)
        spec = partition("batch", None, out_axis, *[None] * (len(out) - 1))
        return y + jnp.reshape(weight.update(x, **axes).astype(y.dtype), y.shape, out_sharding=spec)
    width = math.prod(weight.shape[:inputs])
    matrix: Any = weight
    if isinstance(weight, StackEntry):
        matrix = weight.as_matrix(inputs)
    elif not isinstance(weight, ColumnParts):
        matrix = _as_matrix(weight.astype(x.dtype), inputs)
    unsharded = [None] * (len(out) - 1)
    before, after = length_axes(x), length_axes(x if like is None else like)
    if before is None and after is None:
        flat = jnp.reshape(x, (batch * length, width), out_sharding=partition("batch", in_axis))
        y = _matmul(flat, matrix, dtype, in_axis, out_axis, table=table)
        return jnp.reshape(y, (batch, length, *out), out_sharding=partition("batch", None, out_axis, *unsharded))
    # Rows and length cannot be merged where both are sharded.
    refuse_exact("a product of rows whose length is sharded")
    rows, inside, outside = partition("batch", in_axis, out_axis) or (None,) * 3
    x = jnp.reshape(x, (batch, length, width), out_sharding=PartitionSpec(rows, before, inside))
    spec = PartitionSpec(rows, after, outside)
    if (numbers := product_numbers()) is not None:
        y = quantised_dot(x, matrix, numbers, dtype, spec)
    else:
        y = jnp.einsum("bti,io->bto", x, matrix, preferred_element_type=dtype, out_sharding=spec)
    return jnp.reshape(y, (batch, length, *out), out_sharding=PartitionSpec(rows, after, outside, *unsharded))


def _matmul(
    x: jax.Array, matrix: Any, dtype: DTypeLike | None, in_axis: str | None, out_axis: str | None, *, table: bool
) -> jax.Array:
    """Return x [rows, in] x matrix [in, out], each row the same to the bit however many rows there are (on CPUs).

    With 64 rows or more (128 for a very narrow matrix) XLA's CPU matmul sums over `in` in one order; with fewer it may
    split the sum in two, depending on the size of the matrix. So few rows are padded, or, where that is cheaper, the
    matrix is cut into columns so narrow that the sum is not split. Nothing is changed on accelerators, nor in bfloat16,
    where a row is the same within its rounding.

    A `table` is contracted by its rows there: XLA would transpose the whole of it in each loop of decoding steps.
    On TPUs a row is the same to the bit within `use_numerics("exact")`.
    """
    spec = partition("batch", out_axis)
    if (numbers := product_numbers()) is not None or hasattr(matrix, "qvalue"):
        refuse_exact("a product of quantised numbers")
    if numbers is not None:
        return quantised_dot(x, matrix, numbers, dtype, spec)
    if (kernels := exact_kernels()) is not None:
        return _in_fixed_order(x, matrix, dtype, in_axis, out_axis, table=table, interpret=kernels.interpret)
    if isinstance(matrix, ColumnParts):
        dots = [jnp.dot(x, part, preferred_element_type=dtype, out_sharding=spec) for part in matrix.parts]
        return jnp.concatenate(dots, axis=1) if len(dots) > 1 else dots[0]
    enough = 128 if matrix.shape[1] < 16 else ROWS_OF_ONE_ORDER
    complete = out_axis is None or math.prod(axis_sizes(out_axis).values()) == 1
    whole = complete and math.prod(axis_sizes("batch").values()) == 1

    def dot(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.dot(x, matrix, preferred_element_type=dtype, out_sharding=spec)

    def few_rows(x: jax.Array, matrix: jax.Array) -> jax.Array:
        width, columns, exact = matrix.shape[1], columns_at_once(*matrix.shape), x.dtype == jnp.float32
        if exact and complete and columns is not None:
            return jnp.concatenate([dot(x, matrix[:, i : i + columns]) for i in range(0, width, columns)], axis=1)
        padded = jnp.pad(x, [(0, enough - x.shape[0] if exact else 0), (0, 0)])
        if table:
            if not exact and whole and not varying(x) | varying(matrix):
                return _by_parts(x, matrix.T, dtype)
            y = jax.lax.dot_general(padded, matrix.T, _BY_ROWS, preferred_element_type=dtype, out_sharding=spec)
            return y[: x.shape[0]]
        return dot(padded, matrix)[: x.shape[0]]

    if x.shape[0] >= enough:
        return dot(x, matrix)
    return jax.lax.platform_dependent(x, matrix, cpu=few_rows, default=dot)


def _in_fixed_order(
    x: jax.Array,
    matrix: Any,
    dtype: DTypeLike | None,
    in_axis: str | None,
    out_axis: str | None,
    *,
    table: bool,
    interpret: bool,
) -> jax.Array:
    """Return x [rows, in] x matrix [in, out] by the kernel whose order of sums does not depend on the rows.

    Nor on the mesh: where it may shard the depth, that has as many parts without one (kernels/exact/parts.py).
    """
    from axlearn_like.kernels.exact.matmul import exact_matmul  # Pallas: slow to import

    stack, index = (matrix.stack, matrix.index) if isinstance(matrix, StackEntry) else (matrix, None)
    stack = stack.T if table else stack
    dtype = jnp.dtype(dtype or x.dtype)
    parts = 1 if in_axis is None else parts_of(x.shape[1])
    run = partial(exact_matmul, table=table, interpret=interpret)
    if (specs := partition("batch", in_axis, out_axis)) is None:
        return run(x, stack, index, parts=parts, dtype=dtype)
    rows, inside, outside = specs
    names = () if in_axis is None else sharing_axes(in_axis)
    devices = math.prod(axis_sizes(in_axis).values()) if in_axis is not None else 1

    def own(x: jax.Array, stack: jax.Array, *index: jax.Array) -> jax.Array:
        y = run(x, stack, *index, parts=parts // devices, dtype=jnp.float32 if names else dtype)
        return sum_over_devices(y, names, dtype)

    of_stack = (outside, inside) if table else (*[None] * (stack.ndim - 2), inside, outside)
    arrays = (x, stack) if index is None else (x, stack, index)
    own_specs = tuple(PartitionSpec(*of) for of in ((rows, inside), of_stack, ())[: len(arrays)])
    arrays = jax.sharding.reshard(arrays, own_specs)
    return jax.shard_map(own, in_specs=own_specs, out_specs=PartitionSpec(rows, outside), check_vma=False)(*arrays)


def _by_parts(x: jax.Array, table: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """Return x [rows, in] x table [out, in], some rows of the table at a time.

    XLA's CPU backend casts a table of bfloat16 to float32; so a part fits its cache, and never is all of it there.
    """
    count = min(_TABLE_ROWS, table.shape[0])

    def step(part: jax.Array, y: jax.Array) -> jax.Array:
        first = jnp.minimum(part * count, table.shape[0] - count)  # the last part may begin in the one before
        rows = jax.lax.dynamic_slice_in_dim(table, first, count)
        new = jax.lax.dot_general(x, rows, _BY_ROWS, preferred_element_type=dtype).astype(y.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y, new, first, 1)

    y = jnp.zeros((x.shape[0], table.shape[0]), dtype or x.dtype)
    return jax.lax.fori_loop(0, -(-table.shape[0] // count), step, y)


def _as_matrix(weight: Any, inputs: int) -> Any:
    """Return [*in, *out] as [in, out], sharded as the first of its input and of its output axes are."""
    if hasattr(weight, "qvalue"):  # numbers, and a scale for each output
        return jax.tree.map(lambda part: _as_matrix(part, inputs), weight)
    shape = (math.prod(weight.shape[:inputs]), math.prod(weight.shape[inputs:]))
    if jax.sharding.get_abstract_mesh().empty:
        return weight.reshape(shape)
    spec = jax.typeof(weight).sharding.spec
    both = jax.sharding.PartitionSpec(spec[0], spec[inputs])
    return jnp.reshape(weight, shape, out_sharding=both)
