"""How a learning rate falls: from the fraction of the decay that is over, 0 to 1, to what is left of it, 1 to 0."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

type DecayShape = Callable[[jax.Array], jax.Array]


def linear(fraction: jax.Array) -> jax.Array:
    """1 - x."""
    return 1.0 - fraction


def cosine(fraction: jax.Array) -> jax.Array:
    """Half a cosine."""
    return 0.5 * (1.0 + jnp.cos(jnp.pi * fraction))


def one_minus_sqrt(fraction: jax.Array) -> jax.Array:
    """1 - sqrt(x): falls at once and then slowly (arXiv 2405.18392, equation 2)."""
    return 1.0 - jnp.sqrt(fraction)


def exponential(fraction: jax.Array) -> jax.Array:
    """Ten half-lives, moved to end at 0: (2**-10x - 2**-10) / (1 - 2**-10)."""
    last = 2.0**-10
    return (jnp.exp2(-10.0 * fraction) - last) / (1.0 - last)
