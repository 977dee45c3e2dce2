"""Matrices cut into columns before a loop over tokens, on CPUs.

Few rows are multiplied by so few columns at a time that XLA's CPU matmul sums in one order (`linear._matmul`). Cut in
each step, the columns are copied each time, and a tied head is turned as well; here it is done once for all steps.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.layers.base import bind, split
from axlearn_like.layers.embedding import Embedding, Head
from axlearn_like.layers.linear import ROWS_OF_ONE_ORDER, columns_at_once
from axlearn_like.layers.parameter_names import matrix_axes
from axlearn_like.layers.wrappers.adapters import walk_wrappers
from axlearn_like.layers.wrappers.base import projected, replaced
from axlearn_like.layers.wrappers.matrix_forms import ColumnParts
from mesh.devices import platform


class Cut(NamedTuple):
    """A decoder to take steps with, and its head."""

    model: Any
    head: Any


def cut_columns(model: Any, rows: int) -> Cut:
    """Return an unstacked decoder whose matrices are cut as `project` would in each step of so many rows.

    Not where steps would not cut them, nor within wrappers, whose matrices are not yet those that are multiplied.
    """
    mesh = jax.sharding.get_abstract_mesh()
    alone = mesh.empty or mesh.size == 1
    if platform() != "cpu" or not alone or rows >= ROWS_OF_ONE_ORDER or model.dtype != jnp.float32:
        return Cut(model, model)
    graphdef, params = split(model)
    parts = {
        f"layers/{index}/{path}": found
        for index, block in enumerate(model.blocks())
        if next(walk_wrappers(block), None) is None
        for path, leaf in projected(block)
        if (found := _cut(path, leaf)) is not None
    }
    return Cut(bind(graphdef, replaced(params, parts)), _cut_head(model.output))


def _cut(path: str, weight: Any) -> ColumnParts | None:
    """Return a matrix in parts; None where a step does not cut it."""
    axes = matrix_axes(path, weight.ndim) if isinstance(weight, jax.Array) else None
    if axes is None or axes.stack:
        return None
    depth = math.prod(weight.shape[axis] for axis in axes.inputs)
    return _parts(weight.reshape(depth, -1), weight.shape)


def _parts(matrix: jax.Array, shape: tuple[int, ...], *, turned: bool = False) -> ColumnParts | None:
    columns = columns_at_once(*matrix.shape)
    if columns is None or (columns >= matrix.shape[1] and not turned):
        return None
    return ColumnParts(tuple(matrix[:, first : first + columns] for first in range(0, matrix.shape[1], columns)), shape)


def _cut_head(output: Any) -> Any:
    """Return the layer that makes logits with its matrix, or the transpose of its table, in parts."""
    if not isinstance(output, Embedding | Head):
        return output
    name = "weight_vd" if isinstance(output, Embedding) else "weight_dv"
    graphdef, params = split(output)
    weight = params[name]
    turned = name == "weight_vd"
    found = _parts(weight.T if turned else weight, weight.shape, turned=turned)
    return output if found is None else bind(graphdef, {**params, name: found})
