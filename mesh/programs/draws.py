"""Random arrays on CPUs without a program for each: one small program draws any part of an array of any shape.

A number of `jax.random` is a function of key and index. A jitted initialisation still compiles the generator for each
shape, which for a small model takes longer than its whole training step does.
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl, threefry2x32_p
from jax.typing import DTypeLike

CHUNK = 1 << 16  # numbers of a call of the program: 1.5 ms
Initializer = Callable[..., jax.Array]


@dataclass(frozen=True)
class TruncatedNormal:
    """Initializer of a normal distribution, cut at two of its standard deviations, of which `stddev` is the result's.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mesh.programs.draws import TruncatedNormal
        >>> TruncatedNormal(0.02)(jax.random.key(0), (2, 3), jnp.float32).shape
        (2, 3)
    """

    stddev: float

    def __call__(
        self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, out_sharding: Any = None
    ) -> jax.Array:
        """Return an array of this shape and type, as `jax.nn.initializers.truncated_normal` does."""
        init: Any = jax.nn.initializers.truncated_normal(stddev=self.stddev)
        return init(key, shape, dtype, out_sharding=out_sharding)


class ComputedDraw(Exception):
    """A layer computes with parameters as it makes them, so that they must be there."""


@partial(jax.tree_util.register_dataclass, data_fields=["key"], meta_fields=["init", "entry", "dtype"])
@dataclass(frozen=True)
class Draw:
    """Array that is not drawn yet: a leaf in its place."""

    key: jax.Array  # keys of a stack's entries; or one key, of an array of its own
    init: Initializer  # initializer of an entry
    entry: tuple[int, ...]  # shape of an entry
    dtype: Any  # dtype of the array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return (*self.key.shape, *self.entry)

    @property
    def ndim(self) -> int:
        """Number of its axes."""
        return len(self.shape)

    def __mul__(self, other: object) -> Any:
        raise ComputedDraw


def is_draw(leaf: object) -> bool:
    """Return True for a leaf that is a draw."""
    return isinstance(leaf, Draw)


def can_draw(devices: Iterable[Any]) -> bool:
    """Return True where arrays are drawn on the host: on CPUs, with JAX's default generator."""
    default = jax.config.jax_default_prng_impl == "threefry2x32" and jax.config.jax_threefry_partitionable
    return bool(default) and all(device.platform == "cpu" for device in devices)


def drawn(draw: Draw) -> np.ndarray:
    """Return the array of a draw, to the bit as `jax.jit` of its initializer returns it."""
    dtype = np.dtype(draw.dtype)
    constant = {jax.nn.initializers.zeros: 0, jax.nn.initializers.ones: 1}.get(draw.init)
    if constant is not None:
        return np.zeros(draw.shape, dtype) if constant == 0 else np.ones(draw.shape, dtype)
    keys = draw.key.reshape(-1)
    if not isinstance(draw.init, TruncatedNormal) or dtype != np.float32:
        entry = jax.jit(lambda key: draw.init(key, draw.entry, draw.dtype))
        return np.stack([np.asarray(entry(key)) for key in keys]).reshape(draw.shape)
    array, size = np.empty(draw.shape, dtype), math.prod(draw.entry)
    entries, words = array.reshape(-1, size), np.asarray(jax.random.key_data(keys))
    stddev = np.float32(draw.init.stddev)

    def fill(part: tuple[int, int]) -> None:
        number, start = part
        place = np.array([*words[number], start >> 32, start % 2**32], np.uint32)
        found = _normals(place, stddev)
        entries[number, start : start + CHUNK] = found[: size - start]

    parts = [(number, start) for number in range(len(entries)) for start in range(0, size, CHUNK)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, parts))
    return array


@jax.jit
def _normals(place: jax.Array, stddev: jax.Array) -> jax.Array:
    return TruncatedNormal(stddev)(jax.random.wrap_key_data(place, impl=_AT_INDEX), (CHUNK,))  # pyright: ignore[reportArgumentType]


def _bits(place: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    """Return the bits that `jax.random.bits` has from an index on: `place` is key and index, uint32 [4]."""
    assert width == 32, "of float32"
    low = place[3] + jax.lax.iota(jnp.uint32, shape[0])
    first, second, high = (jnp.broadcast_to(place[word], shape) for word in range(3))
    left, right = threefry2x32_p.bind(first, second, high, low)
    return left ^ right


def _no_other(*_: object) -> Any:
    raise NotImplementedError("a generator of bits from an index on")


_AT_INDEX: Any = define_prng_impl(
    key_shape=(4,), seed=_no_other, split=_no_other, fold_in=_no_other, random_bits=_bits, name="at_index", tag="at"
)
