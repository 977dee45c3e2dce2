"""Matrices of a scanned stack of layers, read in place by the kernels of exact numerics.

A scan hands its body a slice of each stack. XLA's own product reads the slice where it is; before a kernel it is copied
out, which, decoding, moves every matrix three times instead of once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.layers.base import bind, split
from axlearn_like.layers.parameter_names import path_name, without
from axlearn_like.layers.wrappers.base import projected, replaced
from axlearn_like.layers.wrappers.matrix_forms import StackEntry


def keep_in_stack(layers: Any, dtype: Any) -> tuple[Any, Callable[[Any, jax.Array], Any]]:
    """Return what is left to scan over of a stack of layers, and a function that makes a layer of its slice and index.

    Args:
        layers: layers whose matrices may be of this type; others have to be cast, and are scanned over.
        dtype: dtype of activations.
    """
    graphdef, params = split(layers)
    matrices = {path: leaf for path, leaf in projected(layers) if leaf.dtype == dtype}
    rest = without(params, matrices.keys())

    def layer(part: Any, index: jax.Array) -> Any:
        entries = {path: StackEntry(leaf, jnp.asarray(index, jnp.int32)) for path, leaf in matrices.items()}
        sliced = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(part)}
        return bind(graphdef, replaced(params, {**sliced, **entries}))

    return rest, layer
