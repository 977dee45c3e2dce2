"""Functions of which a program has many alike, one for each layer: traced once, and compiled as few kernels as can be.

XLA's CPU backend compiles a fused operation once for all that are alike, constants included. So what differs by layer,
such as its index, should be a number that the compiler does not know.
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def traced_once[F: Callable[..., Any]](function: F) -> F:
    """Return a function that is traced and lowered once for all arguments that are alike, and inlined by XLA.

    It is new for each pass, within which rules, and whatever else a trace depends on besides arguments, do not change.
    """

    def call(*args: Any) -> Any:
        return function(*args)

    return jax.jit(call)  # pyright: ignore[reportReturnType]


def unknown_indices(count: int) -> list[jax.Array]:
    """Return int32 0, 1, ... up to `count`, of which XLA on CPUs knows only how each follows from the one before."""
    found: list[jax.Array] = [jnp.int32(0)]
    while len(found) < count:
        found.append(jax.lax.platform_dependent(found[-1] + 1, cpu=jax.lax.optimization_barrier, default=_same))
    return found[:count]


def unknown(value: int) -> jax.Array:
    """Return an int32 that XLA on CPUs does not know, as every other of its kind."""
    return jax.lax.platform_dependent(jnp.int32(value), cpu=jax.lax.optimization_barrier, default=_same)


def _same(x: jax.Array) -> jax.Array:
    return x
