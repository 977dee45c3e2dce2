"""A computation over rows in as many rounds as there turn out to be, with its gradient.

The first round is in line, so remat decides what of it is stored. Further ones are a loop that usually turns
zero times, and its gradient computes each of them again: their number is known only at run time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mesh.cost.expected import turns
from mesh.sharding import vary, varying

# (rows, weights, sizes, into, turn) -> `into` with that round's rows replaced by their results.
Round = Callable[[jax.Array, Any, Any, jax.Array, Any], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_rounds(one: Round, rows: jax.Array, weights: Any, sizes: Any, rounds: jax.Array) -> jax.Array:
    """Return the results of all rounds for rows [rows, dim]; every row is in at most one, others become zeros.

    Args:
        one: the computation of a round.
        rows: [rows, dim].
        weights: a pytree, or what else has a gradient.
        sizes: integers, or a pytree of them, that say which rows are in which round.
        rounds: int32 [], 1 or more, the same on all devices.
    """
    return _forward(one, rows, weights, sizes, rounds)[0]


def _forward(one: Round, rows: jax.Array, weights: Any, sizes: Any, rounds: jax.Array) -> tuple[jax.Array, Any]:
    nothing = vary(jnp.zeros_like(rows), varying(rows))
    y, pull = jax.vjp(lambda rows, weights: one(rows, weights, sizes, nothing, 0), rows, weights)

    def more(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        turn, y = carry
        return turn + 1, one(rows, weights, sizes, y, turn)

    return _further(more, y, rounds), (pull, rows, weights, sizes, rounds)


def _backward(one: Round, kept: Any, dy: jax.Array) -> tuple[Any, ...]:
    pull, rows, weights, sizes, rounds = kept

    def more(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        turn, total = carry
        nothing = vary(jnp.zeros_like(rows), varying(rows))
        again = jax.vjp(lambda rows, weights: one(rows, weights, sizes, nothing, turn), rows, weights)[1]
        return turn + 1, jax.tree.map(jnp.add, total, again(dy))

    return *_further(more, pull(dy), rounds), None, None


def _further(more: Callable[[Any], Any], first: Any, rounds: jax.Array) -> Any:
    """Return `first` after rounds 1 and on."""
    with turns(0):
        return jax.lax.while_loop(lambda carry: carry[0] < rounds, more, (jnp.ones_like(rounds), first))[1]


in_rounds.defvjp(_forward, _backward)
