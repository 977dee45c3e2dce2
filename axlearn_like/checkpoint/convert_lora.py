"""A checkpoint of a plain model as the start of one with wrapped layers (LoRA, int8)."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.layers.base import fan_in_init
from axlearn_like.layers.parameter_names import matrix_axes, path_name

Tree = Mapping[str, Any]


class WrapPlain(Configurable):
    """A conversion for `StartFrom`: parameters go into the wrappers' inner layers, factors of LoRA are made.

    As `LoRA` makes them (`a` random, `b` zero), so the first loss is that of the checkpoint.
    """

    class Config(ConfigBase["WrapPlain"]):
        seed: int = 0  # of the factors

    def __init__(self, cfg: Config):
        self._seed = cfg.seed

    def saved(self, wanted: Tree) -> Tree:
        """`wanted` without wrappers."""
        return _plain(wanted)

    def convert(self, params: Tree, wanted: Tree) -> Tree:
        """Traced; `wanted` says where wrappers are, and the shapes of factors."""
        return self._wrapped(params, wanted, ())

    def _wrapped(self, plain: Any, wanted: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(wanted, Mapping):
            return plain
        if "inner" in wanted:
            made = {"inner": self._wrapped(plain, wanted["inner"], path)}
            factors = {name: part for name, part in wanted.items() if name != "inner"}
            new = jax.tree_util.tree_map_with_path(lambda below, leaf: self._factor((*path, *below), leaf), factors)
            return {**made, **new}
        keys = {name: (*path, jax.tree_util.DictKey(name)) for name in wanted}
        return {name: self._wrapped(plain[name], part, keys[name]) for name, part in wanted.items()}

    def _factor(self, path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        name = path_name(path)
        axes = matrix_axes(name, like.ndim)
        assert axes is not None, f"no factor of LoRA: {name}"
        if "_b_" in name.rpartition("/")[2]:
            return jnp.zeros(like.shape, like.dtype)
        key = jax.random.fold_in(jax.random.key(self._seed), zlib.crc32(name.encode()))
        return fan_in_init(math.prod(like.shape[axis] for axis in axes.inputs))(key, like.shape, like.dtype)


def _plain(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return _plain(tree["inner"]) if "inner" in tree else {name: _plain(part) for name, part in tree.items()}
