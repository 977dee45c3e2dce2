"""Permutations around a grouped matrix product: rows into the order of their experts, and back.

Each has a gradient that is a permutation too. That of a plain gather would be a scatter, which accelerators run row by
row, and which adds in no defined order.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.kernels.deterministic import no_fuse
from axlearn_like.remat import checkpoint_name


class Order(NamedTuple):
    """A permutation of rows."""

    source: jax.Array  # int32 [rows], row i of the sorted ones was row source[i] before
    target: jax.Array  # int32 [rows], the inverse


def order_by(keys: jax.Array) -> Order:
    """Return the stable order of int32 keys [rows]."""
    source = checkpoint_name(jnp.argsort(keys, stable=True).astype(jnp.int32), "routing")
    places = jnp.arange(len(keys), dtype=jnp.int32)
    target = jnp.zeros_like(places).at[source].set(places, unique_indices=True)
    return Order(source, checkpoint_name(target, "routing"))


def counts(keys: jax.Array, values: int) -> jax.Array:
    """Return int32 [values], how often each of 0 .. values - 1 is among the keys; others are not counted."""
    return jnp.sum(keys[:, None] == jnp.arange(values, dtype=keys.dtype), axis=0, dtype=jnp.int32)


def by_choice(order: Order, tokens: int) -> Order:
    """Return the order of the same rows from unsorted ones that begin with every token's first expert.

    A token's experts are then slices of the first axis. As slices of the second, TPUs would copy all rows for them.
    """
    top_k = len(order.source) // tokens
    source = order.source % top_k * tokens + order.source // top_k
    return Order(source, order.target.reshape(tokens, top_k).T.reshape(-1))


@jax.custom_vjp
def unpermute(x: jax.Array, order: Order) -> jax.Array:
    """Return sorted rows in their original order."""
    return x[order.target]


@jax.custom_vjp
def repeat_sorted(x: jax.Array, order: Order) -> jax.Array:
    """Return tokens [tokens, dim], each once for each of its experts, sorted: [tokens * top_k, dim]."""
    return x[order.source // (len(order.source) // len(x))]


def combine(y: jax.Array, order: Order, weights: jax.Array, rows: jax.Array | None = None) -> jax.Array:
    """Return the weighted sum of each token's expert outputs.

    Args:
        y: [tokens * top_k, dim], sorted.
        order: the order of its rows.
        weights: [tokens, top_k] float32.
        rows: int32 [], rows of y that count, the others are taken for zeros; None: all.

    Returns:
        [tokens, dim] of the type of y. Summed in float32, one expert after the other: the same to the bit in any batch.
    """
    tokens, top_k = weights.shape
    chosen = by_choice(order, tokens)
    each, places = unpermute(y, chosen).reshape(top_k, tokens, -1), chosen.target.reshape(top_k, tokens, 1)

    def product(k: int) -> jax.Array:
        """Return a token's k-th product. By itself: one of all would be written, in float32, and read again."""
        live = each[k] if rows is None else jnp.where(places[k] < rows, each[k], 0)
        return no_fuse(live.astype(jnp.float32) * weights[:, k, None])

    return functools.reduce(jnp.add, map(product, range(top_k))).astype(y.dtype)


def _repeat_sorted_backward(kept: tuple[Order, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    order, like = kept
    each = g[by_choice(order, len(like)).target].reshape(-1, len(like), g.shape[-1])
    return jnp.sum(each, axis=0, dtype=jnp.float32).astype(like.dtype), None


unpermute.defvjp(lambda x, order: (unpermute(x, order), order), lambda order, g: (g[order.source], None))
# The backward pass keeps the number of rows and the type of x, no values.
repeat_sorted.defvjp(lambda x, order: (repeat_sorted(x, order), (order, x[:, :0])), _repeat_sorted_backward)
