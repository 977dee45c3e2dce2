"""Norms of the gradient, of all parameters and of each group of layers, from one pass over it."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.layers.parameter_names import kind_of, path_name

_MODULES = ("router", "experts", "attention", "feed_forward", "embedding", "head")


def layer_group(path: str, ndim: int) -> str:
    """Return the group of the parameter with this path and number of axes.

    "norms" for those of a norm, wherever it is; else the module in the path ("attention", "feed_forward", "experts",
    "router", "embedding", "head"), else "embedding" or "head" by its axes, else "others".
    """
    *modules, _ = path.split("/")
    if modules and modules[-1].endswith("norm"):
        return "norms"
    kind = kind_of(path, ndim)
    by_axes = kind if kind in ("embedding", "head") else "others"
    return next((module for module in _MODULES if module in modules), by_axes)


def grad_norms(grads: Any, frozen: Collection[str] = ()) -> dict[str, jax.Array]:
    """Return the global norm, `grad_norm`, and `grad_norm/<group>` of each group with a trained parameter; float32.

    Each array is squared and summed once, and the groups' squares add up to that of the whole.

    Args:
        grads: nested gradients, of any float type.
        frozen: paths of parameters that are not trained, whose gradients are zero.
    """
    return norms_of(grad_squares(grads, frozen))


def grad_squares(grads: Any, frozen: Collection[str] = ()) -> dict[str, jax.Array]:
    """Return the squares of `grad_norms`: those of parts of the parameters can be added up."""
    total: Any = 0
    squares: dict[str, Any] = {}
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
        total += square
        if (name := path_name(path)) not in frozen:
            group = layer_group(name, grad.ndim)
            squares[group] = squares.get(group, 0) + square
    return {"grad_norm": total, **{f"grad_norm/{group}": squares[group] for group in sorted(squares)}}


def norms_of(squares: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the norms of such squares."""
    return {name: jnp.sqrt(square) for name, square in squares.items()}
