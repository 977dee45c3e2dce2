"""Whole matrices from stacks that are sharded over devices, and back.

Orthogonalising a matrix needs all of it. Its shards are exchanged one mesh axis at a time, inside `jax.shard_map`:

* where the stack divides, by an all-to-all between the stack and the sharded axis: every device gets other, complete
  matrices, and as many numbers as it had;
* else the longer side of the matrix stays sharded (sums over it are then sums over devices), and a sharding of the
  shorter side moves there;
* else the axis is gathered, and the devices along it compute the same.

The compiler's own way from one sharding to the other would replicate the array in between wherever two mesh axes move.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from axlearn_like.layers.parameter_names import MatrixAxes


class Move(NamedTuple):
    """One mesh axis and the array axes between which it moves; None: gathered."""

    name: str
    source: int
    target: int | None


class GatherPlan(NamedTuple):
    """The exchanges that bring an array together: in this order, and back in reverse."""

    spec: PartitionSpec
    moves: tuple[Move, ...]
    order: tuple[int, ...]  # array axes: the stack's, those of rows, those of columns
    rows: int  # number of row axes
    columns: int
    sharded_by: tuple[str, ...]  # mesh axes that still shard the columns after the moves

    def gather(self, x: jax.Array) -> jax.Array:
        """Return matrices [*stack, rows, columns] of one device's part of the array; inside `shard_map`."""
        for name, source, target in self.moves:
            if target is None:
                x = jax.lax.all_gather(x, name, axis=source, tiled=True)
            else:
                x = jax.lax.all_to_all(x, name, split_axis=target, concat_axis=source, tiled=True)
        return as_matrices(x, self)

    def scatter(self, matrices: jax.Array, shard: jax.Array) -> jax.Array:
        """Return the inverse; `shard` gives the shape."""
        shape = list(shard.shape)
        for name, source, target in self.moves:
            size = jax.lax.axis_size(name)
            shape[source] *= size
            if target is not None:
                shape[target] //= size
        x = from_matrices(matrices, self, tuple(shape))
        for name, source, target in reversed(self.moves):
            if target is None:
                size = x.shape[source] // jax.lax.axis_size(name)
                x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(name) * size, size, source)
            else:
                x = jax.lax.all_to_all(x, name, split_axis=source, concat_axis=target, tiled=True)
        return x


def make_plan(x: jax.Array, axes: MatrixAxes) -> GatherPlan:
    """Return the plan for an array, from its shape and sharding.

    Rows are the shorter side of the matrices and columns the longer one, which may stay sharded.
    """
    sharding = jax.typeof(x).sharding
    names = [[entry] if isinstance(entry, str) else list(entry or ()) for entry in sharding.spec]
    sizes = {name: sharding.mesh.shape[name] for on in names for name in on}
    local = [size // math.prod(sizes[n] for n in on) for size, on in zip(x.shape, names, strict=True)]
    rows, columns = sorted((axes.inputs, axes.outputs), key=lambda side: math.prod(x.shape[axis] for axis in side))
    moves, sharded_by = [], []
    for source in (*rows, *columns):
        for name in reversed(names[source]):  # the innermost first: its pieces are adjacent
            size = sizes[name]
            target = next((a for a in axes.stack if local[a] % size == 0), None)
            if target is not None:
                names[target] = [*names[target], name]
            elif source in columns:
                sharded_by.append(name)
                continue
            else:
                target = next((a for a in columns if local[a] % size == 0), None)
                sharded_by += [] if target is None else [name]
            local[source] *= size
            if target is not None:
                local[target] //= size
            moves.append(Move(name, source, target))
    order = (*axes.stack, *rows, *columns)
    return GatherPlan(sharding.spec, tuple(moves), order, len(rows), len(columns), tuple(sharded_by))


def on_matrices(
    x: jax.Array, axes: MatrixAxes, function: Callable[[jax.Array, tuple[str, ...]], jax.Array]
) -> jax.Array:
    """Return `function` applied to the matrices of x, with the shape and the sharding of x.

    Args:
        x: an array, sharded over the current mesh or not.
        axes: which of its axes form the matrices.
        function: `(matrices [..., rows, columns], names) -> the same shape`. The shorter side comes first. `columns` is
            one device's part of the columns if there are `names`: mesh axes over which sums over columns must go. Rows
            and columns may come in another order than in x.
    """
    plan = make_plan(x, axes)

    def body(shard: jax.Array) -> jax.Array:
        return plan.scatter(function(plan.gather(shard), plan.sharded_by), shard)

    if all(entry is None for entry in plan.spec):  # no mesh axes, not even of size 1
        return body(x)
    # A gathered array is the same along that axis, which the type of its slice does not say.
    return jax.shard_map(body, in_specs=plan.spec, out_specs=plan.spec, check_vma=False)(x)


def as_matrices(x: jax.Array, plan: GatherPlan) -> jax.Array:
    """Return matrices [*stack, rows, columns] of a complete array."""
    turned = x.transpose(plan.order)
    column, row = x.ndim - plan.columns, x.ndim - plan.columns - plan.rows
    sizes = math.prod(turned.shape[row:column]), math.prod(turned.shape[column:])
    return turned.reshape(*turned.shape[:row], *sizes)


def from_matrices(matrices: jax.Array, plan: GatherPlan, shape: tuple[int, ...]) -> jax.Array:
    """Return the inverse, for an array of this shape."""
    turned = matrices.reshape([shape[axis] for axis in plan.order])
    return turned.transpose(sorted(range(len(shape)), key=plan.order.__getitem__))
