"""Matrices of a scanned stack of layers, read in place by kernels: those of exact numerics, and grouped products.

A scan hands its body a slice of each stack. XLA's own product reads the slice where it is; before a kernel it is copied
out, which, decoding, moves every matrix three times instead of once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.exact.scope import exact_kernels
from axlearn_like.kernels.quantised_matmul import has_columns
from axlearn_like.layers.base import bind, split
from axlearn_like.layers.parameter_names import path_name, without
from axlearn_like.layers.wrappers.base import grouped, projected, replaced
from axlearn_like.layers.wrappers.matrix_forms import StackEntry


def keep_in_stack(layers: Any, dtype: Any) -> tuple[Any, Callable[[Any, jax.Array], Any] | None]:
    """Return what is left to scan over of a stack of layers, and a function that makes a layer of its slice and index.

    The function is None where no kernel reads a matrix of theirs.

    Args:
        layers: layers of which kernels may read matrices of this type, and experts' of int8 (`has_columns`); others
            have to be cast, and are scanned over.
    """
    graphdef, params = split(layers)
    of_experts = list(grouped(layers))
    by_kernels = [*of_experts, *(() if exact_kernels() is None else projected(layers))]
    matrices = {path: leaf for path, leaf in by_kernels if isinstance(leaf, jax.Array) and leaf.dtype == dtype}
    matrices |= {path: leaf for path, leaf in of_experts if has_columns(leaf)}
    if not matrices:
        return layers, None
    rest = without(params, matrices.keys())

    def layer(part: Any, index: jax.Array) -> Any:
        entries = {path: StackEntry(leaf, jnp.asarray(index, jnp.int32)) for path, leaf in matrices.items()}
        found = jax.tree_util.tree_leaves_with_path(part, is_leaf=lambda value: not isinstance(value, dict))
        sliced = {path_name(path): leaf for path, leaf in found}
        return bind(graphdef, replaced(params, {**sliced, **entries}))

    return rest, layer
