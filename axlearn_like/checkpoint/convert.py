"""Parameters of one run's checkpoint in the layout and dtype that another run wants, by conversions that are named.

A conversion says what the checkpoint must hold for what is wanted, and how the one is made of the other. Arrays are
read straight onto the devices, spread as they will be, and converted there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.checkpoint.checkpointer import check_params, restore_params
from axlearn_like.checkpoint.manifest import CheckpointError
from axlearn_like.config import REQUIRED, ConfigBase, Configurable

Tree = Mapping[str, Any]


class Conversion(Protocol):
    """One step from what was saved to what is wanted; built by `config.build()`."""

    def saved(self, wanted: Tree) -> Tree:
        """What must be there to make `wanted` of it: `jax.ShapeDtypeStruct`s with shardings, both."""
        ...

    def convert(self, params: Tree, wanted: Tree) -> Tree:
        """Makes it; traced."""
        ...


class Cast(Configurable):
    """Floating-point parameters that were saved in another dtype."""

    class Config(ConfigBase["Cast"]):
        saved: Literal["float32", "bfloat16"] = REQUIRED
        wanted: Literal["float32", "bfloat16"] = REQUIRED

    def __init__(self, cfg: Config):
        self._saved, self._wanted = jnp.dtype(cfg.saved), jnp.dtype(cfg.wanted)

    def saved(self, wanted: Tree) -> Tree:
        return jax.tree.map(lambda x: _like(x, dtype=self._saved) if x.dtype == self._wanted else x, wanted)

    def convert(self, params: Tree, wanted: Tree) -> Tree:
        return jax.tree.map(lambda x, to: x.astype(to.dtype), params, wanted)


class StackLayers(Configurable):
    """A list of layers was saved (`layers/0/...`), a scanned stack is wanted (`layers/...`, first axis the layer)."""

    class Config(ConfigBase["StackLayers"]):
        key: str = "layers"

    def __init__(self, cfg: Config):
        self._key = cfg.key

    def saved(self, wanted: Tree) -> Tree:
        stack = _part(wanted, self._key)
        one = jax.tree.map(lambda x: _like(x, shape=x.shape[1:], drop=1), stack)
        return {**wanted, self._key: {str(index): one for index in range(_depth(stack))}}

    def convert(self, params: Tree, wanted: Tree) -> Tree:
        layers = params[self._key]
        ordered = [layers[str(index)] for index in range(len(layers))]
        return {**params, self._key: jax.tree.map(lambda *parts: jnp.stack(parts), *ordered)}


class UnstackLayers(Configurable):
    """A scanned stack was saved (`layers/...`, first axis the layer), a list of layers is wanted (`layers/0/...`)."""

    class Config(ConfigBase["UnstackLayers"]):
        key: str = "layers"

    def __init__(self, cfg: Config):
        self._key = cfg.key

    def saved(self, wanted: Tree) -> Tree:
        layers = _part(wanted, self._key)
        if not all(str(name).isdigit() for name in layers):
            raise CheckpointError(f"UnstackLayers: {self._key!r} of this model is no list of layers")
        stack = jax.tree.map(lambda x: _like(x, shape=(len(layers), *x.shape), add=1), next(iter(layers.values())))
        return {**wanted, self._key: stack}

    def convert(self, params: Tree, wanted: Tree) -> Tree:
        stack = params[self._key]
        layers = {name: jax.tree.map(lambda x, i=int(name): x[i], stack) for name in wanted[self._key]}
        return {**params, self._key: layers}


def restore_converted(path: str | Path, abstract_params: Tree, conversions: Sequence[Conversion]) -> Any:
    """The parameters of any run's checkpoint, after `conversions` in this order.

    Args:
        path: as for `restore_params`.
        abstract_params: what is wanted: `jax.ShapeDtypeStruct`s with shardings.
        conversions: from what was saved to what is wanted.

    Raises:
        CheckpointError: nothing there, damaged, or not what the conversions start from: names the first array.
    """
    stages = _stages(abstract_params, conversions)
    params = restore_params(path, stages[0])
    if not conversions:
        return params

    def convert(params: Any) -> Any:
        for conversion, wanted in zip(conversions, stages[1:], strict=True):
            params = conversion.convert(params, wanted)
        return params

    shardings = jax.tree.map(lambda x: x.sharding, abstract_params)
    return jax.jit(convert, out_shardings=shardings)(params)


def _stages(abstract_params: Tree, conversions: Sequence[Conversion]) -> list[Tree]:
    """What was saved, what each conversion makes of it, and what is wanted."""
    stages = [abstract_params]
    for conversion in reversed(conversions):
        stages.insert(0, conversion.saved(stages[0]))
    return stages


class StartFrom(Configurable):
    """Where a new run takes its first parameters from; the optimizer starts afresh."""

    class Config(ConfigBase["StartFrom"]):
        path: str = REQUIRED  # a run directory, its checkpoints, its checkpoints/best, or one step
        conversions: tuple[ConfigBase, ...] = ()

    def __init__(self, cfg: Config):
        self._path = cfg.path
        self._conversions: list[Conversion] = [conversion.build() for conversion in cfg.conversions]

    def check(self, abstract_params: Any) -> None:
        """Refuse what `params` would, as far as can be known without reading an array (CheckpointError)."""
        check_params(self._path, _stages(abstract_params, self._conversions)[0])

    def params(self, abstract_params: Any) -> Any:
        """Them, in the shapes, dtypes and shardings of `abstract_params`. CheckpointError: see restore_converted."""
        return restore_converted(self._path, abstract_params, self._conversions)


def _part(tree: Tree, key: str) -> Any:
    if key not in tree:
        raise CheckpointError(f"layers are to be converted, but this model has no {key!r}; it has {', '.join(tree)}")
    return tree[key]


def _depth(stack: Any) -> int:
    return jax.tree.leaves(stack)[0].shape[0]


def _like(x: Any, *, shape: Any = None, dtype: Any = None, drop: int = 0, add: int = 0) -> jax.ShapeDtypeStruct:
    """`x` with another shape or dtype, spread the same way; axes are dropped from or added to the front."""
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(*[None] * add, *sharding.spec[drop:])
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, dtype or x.dtype, sharding=sharding)
