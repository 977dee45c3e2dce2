"""Batches on the devices: the rows that a process needs, and their transfer."""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mesh.errors import UserError
from mesh.rules import axis_sizes, partition


def shard_batch(tree: Any, *, rows: int | None = None, by_length: bool = True) -> Any:
    """Put host arrays on the devices of the mesh in force.

    Rows are sharded over its batch axes and their length over its sequence axis; scalars are replicated.

    Args:
        tree: tree of arrays [rows, ...]; in each of several processes complete ones, or their `local_rows` alone.
        rows: rows of the complete batch, where the arrays hold `local_rows(rows)` of them; None: they are complete.
        by_length: False for arrays whose second axis is not a row's length: devices that share rows have all of them.

    Raises:
        UserError: an array has a number of rows, or of tokens in a row, that does not divide over the mesh.
    """
    if not axis_sizes("batch"):
        return jax.device_put(tree)
    mesh = jax.sharding.get_mesh()

    def global_shape(x: Any) -> tuple[int, ...]:
        return x.shape if rows is None or not x.ndim else (rows, *x.shape[1:])

    def spec_of(path: Any, x: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "array"
        return batch_partition(global_shape(x), name, by_length=by_length)

    specs = jax.tree_util.tree_map_with_path(spec_of, tree)
    if mesh.empty or not mesh.is_multi_process:
        return jax.device_put(tree, specs)  # all at once: a call for each array costs the host a third more
    held = None if rows is None else local_rows(rows)

    def put(x: Any, spec: PartitionSpec) -> jax.Array:
        def part(index: Any) -> Any:
            if held is None or not index:
                return x[index]
            first, last, _ = index[0].indices(global_shape(x)[0])
            at = int(np.searchsorted(held, first))
            return x[(slice(at, at + last - first), *index[1:])]

        # device_put would compare the arrays of all processes first, over the network.
        return jax.make_array_from_callback(global_shape(x), NamedSharding(mesh, spec), part)

    return jax.tree.map(put, tree, specs)


def local_rows(rows: int) -> np.ndarray:
    """Return the rows of a batch that the devices of this process hold on the mesh in force: int64, ascending.

    All of them, unless the mesh is of several processes. Processes whose devices differ along other axes only, as in
    tensor parallelism over processes, hold the same.

    Raises:
        UserError: the rows do not divide over the mesh.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty or not mesh.is_multi_process:
        return np.arange(rows)
    indices = NamedSharding(mesh, batch_partition((rows,), "array")).addressable_devices_indices_map((rows,))
    return np.unique(np.concatenate([np.arange(rows)[index] for index in indices.values()]))


def to_local(array: jax.Array) -> np.ndarray:
    """Return the `local_rows` of an array [rows, ...] that is sharded by rows alone."""
    if array.is_fully_addressable:
        return np.asarray(array)
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[first]) for first in sorted(parts)])


def batch_partition(shape: tuple[int, ...], name: str, *, by_length: bool = True) -> PartitionSpec:
    """Return the partition of an array of a batch: [rows], [rows, tokens], [rows, tokens, ...] or a scalar.

    `by_length`: see `shard_batch`.

    Raises:
        UserError: rows or tokens do not divide over the mesh; the message has the array's name.
    """
    rows, length = axis_sizes("batch"), axis_sizes("length")
    sharded = by_length and math.prod(length.values()) > 1
    if shape:
        _check(name, shape[0], "rows", rows)
    if len(shape) > 1 and sharded:
        _check(name, shape[1], "tokens in a row", length)
    axes = ["batch", "length" if sharded else None, *[None] * len(shape)]
    return partition(*axes[: len(shape)]) or PartitionSpec()


def _check(name: str, size: int, things: str, sizes: dict[str, int]) -> None:
    if size % math.prod(sizes.values()):
        over = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise UserError(f"batch: {name} has {size} {things}, which do not divide evenly over the mesh ({over})")
