"""Parameters of one run's checkpoint in the layout and dtype of another run, by named conversions.

A conversion says which arrays the checkpoint must hold for the wanted ones, and computes the one from the other. Arrays
are read straight onto the devices, in their final sharding, and converted there.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, override

import jax
import jax.numpy as jnp

from axlearn_like.checkpoint.plain.plain_arrays import as_stacks
from axlearn_like.checkpoint.reader import check_params, restore_params
from axlearn_like.config import REQUIRED, ConfigBase, Configurable, marking, path_of
from axlearn_like.layers.base import fan_in_init
from axlearn_like.layers.parameter_names import axes_of_matrix, kind_of, path_name
from axlearn_like.layers.wrappers.int8_base import int8_params, int8_source
from axlearn_like.layers.wrappers.lora import factor_names, norms
from axlearn_like.run.object_store import local_path
from mesh.files.bucket import Bucket, bucket_url

Tree = Mapping[str, Any]


class Conversion(Protocol):
    """One step from what was saved to what is wanted; built by `config.build()`."""

    def saved(self, wanted: Tree) -> Tree:
        """Return the arrays from which `wanted` is made; both are `jax.ShapeDtypeStruct`s with shardings."""
        ...

    def convert(self, params: Tree, wanted: Tree) -> Tree:
        """Return the wanted arrays; traced."""
        ...


class ParamsReader(Protocol):
    """Reader of parameters that are no checkpoint of ours; built by `config.build(path=...)`."""

    def check(self, abstract_params: Any) -> None:
        """Refuse (UserError) what `params` would refuse, as far as can be known without reading an array."""
        ...

    def params(self, abstract_params: Any) -> Any:
        """Return the arrays in the shapes, dtypes and shardings of `abstract_params`."""
        ...


class WrapPlain(Configurable):
    """A plain model was saved, wrapped layers (LoRA, int8) are wanted: parameters go into the inner layers.

    Factors of LoRA are initialised as `LoRA` does (`a` random, `b` zero, magnitudes the norms), so the first loss is
    that of the checkpoint.
    """

    class Config(ConfigBase["WrapPlain"]):
        seed: int = 0  # random seed of the LoRA factors

    def __init__(self, cfg: Config):
        self._seed = cfg.seed

    def saved(self, wanted: Tree) -> Tree:
        """Return `wanted` without wrappers."""
        return _plain(wanted)

    def convert(self, params: Tree, wanted: Tree) -> Tree:
        """Wrap; `wanted` says where wrappers are, and the shapes of factors."""
        return self._wrapped(params, wanted, ())

    def _wrapped(self, plain: Any, wanted: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(wanted, Mapping):
            return plain
        if "inner" in wanted:
            made = {"inner": self._wrapped(plain, wanted["inner"], path)}
            factors = {name: part for name, part in wanted.items() if name not in ("inner", "base")}
            inner = {path_name(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(made["inner"])}
            matrices = [name for name, leaf in inner.items() if kind_of(name, leaf.ndim) == "matrix"]
            magnitudes = {factor_names(name, inner[name].ndim).magnitude: name for name in matrices}

            def new_factor(below: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
                place = path_name(below).partition("/")[2]  # path after `lora/`
                if place not in magnitudes:
                    return self._factor((*path, *below), leaf)
                return norms(magnitudes[place], inner[magnitudes[place]])

            new = jax.tree_util.tree_map_with_path(new_factor, factors)
            return {**(int8_params(made["inner"], wanted) if "base" in wanted else made), **new}
        keys = {name: (*path, jax.tree_util.DictKey(name)) for name in wanted}
        return {name: self._wrapped(plain[name], part, keys[name]) for name, part in wanted.items()}

    def _factor(self, path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        name = path_name(path)
        if "_b_" in name.rpartition("/")[2]:
            return jnp.zeros(like.shape, like.dtype)
        key = jax.random.fold_in(jax.random.key(self._seed), zlib.crc32(name.encode()))
        inputs = axes_of_matrix(name, like.ndim).inputs
        return fan_in_init(math.prod(like.shape[axis] for axis in inputs))(key, like.shape, like.dtype)


class NewHead(Configurable):
    """A language model was saved, one with a head of layers/heads.py is wanted: the head is new, its bias zero."""

    class Config(ConfigBase["NewHead"]):
        seed: int = 0

    def __init__(self, cfg: Config):
        self._seed = cfg.seed

    def saved(self, wanted: Tree) -> Tree:
        """Return `wanted` without the head."""
        return {name: part for name, part in wanted.items() if name != "head"}

    def convert(self, params: Tree, wanted: Tree) -> Tree:
        """Add the head."""
        key = jax.random.fold_in(jax.random.key(self._seed), zlib.crc32(b"head"))

        def new(like: jax.ShapeDtypeStruct) -> jax.Array:
            init = fan_in_init(like.shape[0]) if like.ndim > 1 else jax.nn.initializers.zeros
            return init(key, like.shape, like.dtype)

        return {**params, **({"head": jax.tree.map(new, wanted["head"])} if "head" in wanted else {})}


def restore_converted(
    path: str | Path,
    abstract_params: Tree,
    conversions: Sequence[Conversion],
    read: Callable[[Any], Any] | None = None,
) -> Any:
    """Read the parameters of any run's checkpoint and apply `conversions` in this order.

    Args:
        abstract_params: the wanted arrays: `jax.ShapeDtypeStruct`s with shardings.
        conversions: from the saved arrays to the wanted ones.
        read: reads the saved arrays, instead of a checkpoint at `path`.

    Raises:
        CheckpointError: nothing there, damaged, or not what the conversions start from: names the first array.
    """
    stages = _stages(as_stacks(abstract_params) if conversions else abstract_params, conversions)
    params = read(stages[0]) if read is not None else restore_params(path, stages[0])
    if not conversions:
        return params

    def convert(params: Any) -> Any:
        for conversion, wanted in zip(conversions, stages[1:], strict=True):
            params = conversion.convert(params, wanted)
        return params

    shardings = jax.tree.map(lambda x: x.sharding, abstract_params)
    return jax.jit(convert, out_shardings=shardings)(params)


def _stages(abstract_params: Tree, conversions: Sequence[Conversion]) -> list[Tree]:
    """Return the saved arrays, the result of each conversion, and last the wanted arrays."""
    stages = [abstract_params]
    for conversion in reversed(conversions):
        stages.insert(0, conversion.saved(stages[0]))
    return stages


class StartFrom(Configurable):
    """Source of a new run's first parameters; the optimizer state is new."""

    class Config(ConfigBase["StartFrom"]):
        path: str = REQUIRED  # a run directory (its newest weights), RUN@best, RUN@STEP, or the path of a checkpoint
        conversions: tuple[ConfigBase, ...] = ()
        reader: ConfigBase | None = None  # reader of another file format (`ParamsReader`); None: a run's checkpoint

        @override
        def check_fields(self) -> None:
            if url := bucket_url(self.path):
                with self.errors_in("path"):
                    Bucket(url, "path")
                return
            path = local_path(self.path, "path")
            foreign = (path / "config.json").is_file() and not (path / "config.txt").is_file()
            self.require(
                "path",
                self.reader is not None or not foreign,
                "a run's directory; for one in Hugging Face's form use models.huggingface.hf_weights(path), or axl "
                "convert import",
            )

    def __init__(self, cfg: Config):
        self._path, self._place = cfg.path, path_of(cfg)
        self._reader: ParamsReader | None = None if cfg.reader is None else cfg.reader.build(path=cfg.path)
        self._conversions: list[Conversion] = [conversion.build() for conversion in cfg.conversions]

    def check(self, abstract_params: Any) -> None:
        """Refuse what `params` would refuse, as far as can be known without reading an array (CheckpointError)."""
        wanted = _stages(abstract_params, self._conversions)[0]
        with marking(self._place):
            if self._reader is not None:
                self._reader.check(wanted)
            else:
                check_params(self._path, wanted)

    def params(self, abstract_params: Any) -> Any:
        """Return them in the shapes, dtypes and shardings of `abstract_params`. Raises as `restore_converted`."""
        read = None if self._reader is None else self._reader.params
        with marking(self._place):
            return restore_converted(self._path, abstract_params, self._conversions, read)


def _plain(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return int8_source(tree)
    return _plain(tree["inner"]) if "inner" in tree else {name: _plain(part) for name, part in tree.items()}
