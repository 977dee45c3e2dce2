"""The step of the biases that balance experts, which is not gradient descent (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

A router with such a bias calls it `balance_bias_e`, and returns as its gradient by how much each expert's load exceeds
the mean (`axlearn_like.layers.moe.router.balance_bias`). Averaged over microbatches, layers and devices like any
gradient, it reaches the learner, which removes it before it looks at gradients, and moves each bias by a fixed step
against its sign. So clipping, norms, moments and decay of the other parameters are not affected.
"""

from typing import Any

import jax
import jax.numpy as jnp

BIAS = "balance_bias_e"


def without_loads(grads: Any) -> Any:
    """Return gradients with zeros in place of the loads of biases."""
    return jax.tree_util.tree_map_with_path(lambda path, g: jnp.zeros_like(g) if _is_bias(path) else g, grads)


def with_balancing(updates: Any, grads: Any, rate: float, finite: jax.Array) -> Any:
    """Return updates with those of the biases: -rate for experts above the mean load, +rate below it.

    Args:
        updates: updates to be added to the parameters.
        grads: with the loads.
        rate: the step; DeepSeek-V3 has 0.001, and 0 at the end.
        finite: bool [], False leaves everything unchanged.
    """

    def one(path: Any, update: jax.Array, g: jax.Array) -> jax.Array:
        if not _is_bias(path):
            return update
        return jnp.where(finite & jnp.isfinite(g), -rate * jnp.sign(g), 0.0).astype(update.dtype)

    return jax.tree_util.tree_map_with_path(one, updates, grads)


def _is_bias(path: tuple[Any, ...]) -> bool:
    return bool(path) and jax.tree_util.keystr(path[-1:], simple=True) == BIAS
