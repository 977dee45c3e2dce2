"""Storage of the learner's large state between updates: in fewer bits, or on the host."""

import fnmatch
from collections.abc import Callable
from typing import Any, override

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase, Configurable, path_of
from axlearn_like.layers.parameter_names import path_name
from axlearn_like.learner.errors import LearnerError
from mesh.errors import did_you_mean

HOST = "pinned_host"


class Storage(Configurable):
    """Base of storages of the arrays whose path fits the config's `match`."""

    def __init__(self, cfg: Any):
        self._cfg, self._where = cfg, path_of(cfg)

    def store(self, tree: Any, count: jax.Array) -> Any:
        """Return the state encoded for storage."""
        raise NotImplementedError

    def load(self, tree: Any) -> Any:
        """Return the state decoded, to compute with."""
        raise NotImplementedError

    def placed(self, abstract: Any) -> Any:
        """Return abstract arrays in the memory of their storage."""
        return abstract

    def _each(self, function: Callable[[Any], Any], tree: Any) -> Any:
        """Return `function` of the arrays that fit, and the others as they are."""
        fits = lambda path, x: _fits(self._cfg.match, path, x)  # noqa: E731
        return jax.tree_util.tree_map_with_path(lambda path, x: function(x) if fits(path, x) else x, tree)


class BFloat16State(Storage):
    """float32 arrays whose path fits `match`, stored as bfloat16; the update itself is computed in float32.

    Rounded stochastically: up with the probability of the fraction cut off, so that the mean over many updates is
    right. Rounding to the nearest would lose every change below 2**-9 of the value, as a second moment with b2 = 0.999
    has. The random bits follow from `seed`, the number of updates and the array's index, so resumed runs are the same.
    A value that bfloat16 can represent is unchanged, so a skipped update changes nothing.
    """

    class Config(ConfigBase["BFloat16State"]):
        match: str = "optax/*"  # e.g. "*/mu/*": first moments only
        stochastic: bool = True
        seed: int = 0

    @override
    def store(self, tree: Any, count: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(self._cfg.seed), count)
        _check_found(tree, self._cfg.match, self._where, lambda x: x.dtype == jnp.float32)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)

        def one(index: int, path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            if not (_fits(self._cfg.match, path, x) and x.dtype == jnp.float32):
                return x
            return _round(x, jax.random.fold_in(key, index)) if self._cfg.stochastic else x.astype(jnp.bfloat16)

        return jax.tree.unflatten(treedef, [one(index, *leaf) for index, leaf in enumerate(leaves)])

    @override
    def load(self, tree: Any) -> Any:
        return self._each(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


class HostOffload(Storage):
    """Arrays whose path fits `match`, stored in host memory and copied to the devices for each update.

    This trades time (twice the bytes over the link at every update) for memory of the devices. The CPU backend has such
    a memory too, and the same program runs there.
    """

    class Config(ConfigBase["HostOffload"]):
        match: str = "*"

    @override
    def store(self, tree: Any, count: jax.Array) -> Any:
        _check_found(tree, self._cfg.match, self._where, lambda _: True)
        return self._each(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)

    @override
    def load(self, tree: Any) -> Any:
        return self._each(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)

    @override
    def placed(self, abstract: Any) -> Any:
        def on_host(a: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding.with_memory_kind(HOST))

        return self._each(on_host, abstract)


def _fits(match: str, path: tuple[Any, ...], x: Any) -> bool:
    return x.ndim > 0 and fnmatch.fnmatchcase(path_name(path), match)


def _check_found(tree: Any, match: str, place: str, wanted: Any) -> None:
    arrays = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if x.ndim and wanted(x)]
    if not any(_fits(match, path, x) for path, x in arrays):
        names = [path_name(path) for path, _ in arrays]
        raise LearnerError(f"{place}.match: {match!r} matches no array of the state{did_you_mean(match, names)}")


def _round(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return x as bfloat16, rounded stochastically: random bits are added to those that are then cut off."""
    spec = jax.typeof(x).sharding.spec
    out = None if jax.sharding.get_abstract_mesh().empty else spec
    noise = jax.random.bits(key, x.shape, jnp.uint16, out_sharding=out).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    cut = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)
