"""The last product of experts and the weighted sum of a token's results, with a gradient that needs neither.

The gradient of a weight is the product of a result and of the sum's gradient. That is as well the product of the hidden
units and of the gradient that the matrix hands back to them, which is computed anyway. So the backward pass recomputes
no result, and puts none back into the order of tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.grouped_matmul import grouped_product
from axlearn_like.layers.moe.dispatch import Order, combine


@jax.custom_vjp
def weighted_results(
    hidden: jax.Array, down: jax.Array, sizes: jax.Array, order: Order, weights: jax.Array
) -> jax.Array:
    """Return the weighted sum of each token's expert outputs, [tokens, dim].

    Args:
        hidden: [tokens * top_k, hidden], sorted by expert; zeros in rows beyond the sizes.
        down: [experts, hidden, dim].
        sizes: int32 [experts], rows of each; those beyond them count as zeros.
        order: the order of the rows.
        weights: float32 [tokens, top_k].
    """
    return combine(grouped_product(hidden, down, sizes), order, weights, jnp.sum(sizes))


def _forward(hidden: jax.Array, down: jax.Array, sizes: jax.Array, order: Order, weights: jax.Array) -> Any:
    return weighted_results(hidden, down, sizes, order, weights), (hidden, down, sizes, order, weights)


def _backward(kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None, None, jax.Array]:
    hidden, down, sizes, order, weights = kept
    g_rows = g[order.source // weights.shape[1]]
    of_rows = weights.reshape(-1)[order.source][:, None]
    weighted = (hidden * of_rows).astype(hidden.dtype)
    product = functools.partial(grouped_product, sizes=sizes)
    to_hidden, to_down = jax.vjp(product, weighted, down)[1](g_rows)
    live = (jnp.arange(len(hidden)) < jnp.sum(sizes))[:, None]  # a product is undefined for rows without a group
    to_hidden = jnp.where(live, to_hidden.astype(jnp.float32), 0)
    to_weights = jnp.sum(to_hidden * hidden, axis=1)[order.target].reshape(weights.shape)
    return (to_hidden * of_rows).astype(hidden.dtype), to_down, None, None, to_weights


weighted_results.defvjp(_forward, _backward)
