"""Jitted functions that compute the same are one function: a process traces, lowers and loads each program once.

`jax.jit` keeps what it has compiled by the function object, so two engines of one config, or a trainer that is built
again to resume, would each trace their programs again; for small models that takes longer than to run them.

Not in a notebook or another interactive session: there code changes between two builds, by a cell or by a reload, in
functions that no key can name.

XLA's CPU backend compiles a fused operation once for all that are alike, constants included. So what differs by layer,
such as its index, should be a number that the compiler does not know (`traced_once` and the like).
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp

KEPT = 16  # the ones used last: each keeps its executables in memory


class Shared:
    """A store of the things used last, by key, for all threads."""

    def __init__(self, kept: int):
        """Keep this many."""
        self._kept, self._made = kept, OrderedDict[Hashable, Any]()
        self._lock = Lock()

    def get[T](self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made for an equal key, or make it; always, if the key cannot be hashed."""
        if _is_interactive() or not _is_hashable(key):
            return make()
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        made = make()
        with self._lock:
            kept = self._made.setdefault(key, made)  # two threads may have made the same: all use one
            while len(self._made) > self._kept:
                self._made.popitem(last=False)
        return kept

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._made.clear()


_programs = Shared(KEPT)


def shared_program[T](key: Hashable, make: Callable[[], T]) -> T:
    """Return what was made for an equal key, or make it.

    Args:
        key: key of everything that the functions are traced with, apart from their arguments, the mesh and the axis
            rules, by which `jax.jit` tells programs apart itself. If it cannot be hashed, as with a layer that holds a
            list or a dict, nothing is shared.
        make: returns jitted functions, in any form. They may hold no arrays.
    """
    return _programs.get(key, make)


def forget_programs() -> None:
    """Forget all, so that what has changed within the code of functions that are traced takes effect."""
    _programs.clear()


def _is_interactive() -> bool:
    return hasattr(sys, "ps1")  # Python's prompt, which IPython and its kernels set too


def _is_hashable(key: Hashable) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


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
