"""From rows on hosts to a batch on the devices: which rows a process needs, and putting them there."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mesh.errors import UserError
from mesh.rules import axis_sizes, partition


def shard_batch(tree: Any, *, rows: int | None = None) -> Any:
    """Put host arrays on the devices of the mesh in force: rows over its batch axes, their length, if it cuts that,
    over its sequence axis; scalars are copied.

    Args:
        tree: of arrays [rows, ...], on a mesh of several processes whole ones in each, or of `local_rows` alone.
        rows: of the whole batch, where the arrays hold `local_rows(rows)` of them; None: they are whole.

    Raises:
        UserError: an array has a number of rows, or of tokens in a row, that does not divide over the mesh.
    """
    if not axis_sizes("batch"):
        return jax.device_put(tree)
    mesh = jax.sharding.get_mesh()

    def whole(x: Any) -> tuple[int, ...]:
        return x.shape if rows is None or not x.ndim else (rows, *x.shape[1:])

    def spread(path: Any, x: Any) -> PartitionSpec:
        return batch_partition(whole(x), jax.tree_util.keystr(path, simple=True, separator=".") or "array")

    specs = jax.tree_util.tree_map_with_path(spread, tree)
    if mesh.empty or not mesh.is_multi_process:
        return jax.device_put(tree, specs)  # all at once: a call for each array costs the host a third more
    held = None if rows is None else local_rows(rows)

    def put(x: Any, spec: PartitionSpec) -> jax.Array:
        def part(box: Any) -> Any:
            if held is None or not box:
                return x[box]
            first, last, _ = box[0].indices(whole(x)[0])
            at = int(np.searchsorted(held, first))
            return x[(slice(at, at + last - first), *box[1:])]

        # device_put would compare the arrays of all processes first, over the network.
        return jax.make_array_from_callback(whole(x), NamedSharding(mesh, spec), part)

    return jax.tree.map(put, tree, specs)


def local_rows(rows: int) -> np.ndarray:
    """Which of a batch's rows the devices of this process hold, on the mesh in force: int64, rising.

    All of them, unless the mesh is of several processes. Processes whose devices differ along other axes only, as in
    tensor parallelism over processes, hold the same.

    Raises:
        UserError: the rows do not divide over the mesh.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty or not mesh.is_multi_process:
        return np.arange(rows)
    boxes = NamedSharding(mesh, batch_partition((rows,), "array")).addressable_devices_indices_map((rows,))
    return np.unique(np.concatenate([np.arange(rows)[box] for box in boxes.values()]))


def batch_partition(shape: tuple[int, ...], name: str) -> PartitionSpec:
    """How an array of a batch is spread: [rows], [rows, tokens], [rows, tokens, ...] or a scalar.

    Raises:
        UserError: rows or tokens do not divide over the mesh; the message has the array's name.
    """
    rows, length = axis_sizes("batch"), axis_sizes("length")
    cut = math.prod(length.values()) > 1
    if shape:
        _check(name, shape[0], "rows", rows)
    if len(shape) > 1 and cut:
        _check(name, shape[1], "tokens in a row", length)
    axes = ["batch", "length" if cut else None, *[None] * len(shape)]
    return partition(*axes[: len(shape)]) or PartitionSpec()


def _check(name: str, size: int, things: str, sizes: dict[str, int]) -> None:
    if size % math.prod(sizes.values()):
        over = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise UserError(f"batch: {name} has {size} {things}, which do not divide evenly over the mesh ({over})")
