"""The weights of experts on their way into a computation: types, partitions, shards that are gathered."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import PartitionSpec

from axlearn_like.kernels.quantised_matmul import has_columns
from axlearn_like.layers.wrappers.matrix_forms import StackEntry
from mesh.rules import manual_axis_sizes


class ExpertWeights(NamedTuple):
    """The weights of all experts of a device, in the type of the activations; or their partitions."""

    gate: Any
    up: Any
    down: Any
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None


def each_weight(function: Callable[[jax.Array], jax.Array], weights: ExpertWeights) -> ExpertWeights:
    """Return `function` of all weights but those that are in a stack of the type of the activations already."""
    return ExpertWeights(*(w if w is None or isinstance(w, StackEntry) else function(w) for w in weights))


def partitions_in_stack(weights: ExpertWeights, partitions: ExpertWeights) -> ExpertWeights:
    """Return the partitions of weights of which some are entries of a stack."""

    def of_stack(stack: Any, spec: PartitionSpec) -> Any:
        where: Any = PartitionSpec(None, *spec)
        if has_columns(stack):
            where = cast("Any", stack).replace(qvalue=where, scale=PartitionSpec(*where[:-2], None, where[-1]))
        return StackEntry(where, cast("Any", PartitionSpec()))

    pairs = zip(weights, partitions, strict=True)
    return ExpertWeights(*(of_stack(w.stack, spec) if isinstance(w, StackEntry) else spec for w, spec in pairs))


def gathered_weight(weight: Any, axis: int) -> Any:
    """Return a matrix gathered over its model width; the gradient is scattered again."""
    names = tuple(name for name, size in manual_axis_sizes("embed").items() if size > 1)
    return jax.lax.all_gather(weight, names, axis=axis, tiled=True) if names else weight
