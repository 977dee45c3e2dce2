"""Layers around another layer that change the weights it computes with: low-rank updates, rounding.

A wrapper replaces the layer in its parent. What a parent passes down (`dim`) goes to the inner layer's config; what is
read from the config or the layer (`cache_shape`, ...), and is not the wrapper's own, is the inner one's. A wrapper
knows only the names of the inner layer's parameters, so every layer can be wrapped, and inside a scanned stack the
weights of one layer exist at a time.

`plain_config` and `plain_params` give the model without its wrappers, for an engine or an export.
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase, path_of, replace, walk_configs
from axlearn_like.layers.base import Layer, Params, bind, split
from axlearn_like.layers.parameter_names import Kind, kind_of, path_name
from mesh.errors import UserError, did_you_mean
from mesh.programs.draws import is_draw


class Wrapper(Layer):
    """Base of wrappers: calls the inner layer with `weights` of its parameters."""

    kinds: ClassVar[tuple[Kind, ...]] = ("matrix",)  # kinds of parameters that it changes

    class Config(ConfigBase["Wrapper"]):
        inner: ConfigBase = REQUIRED
        match: str | tuple[str, ...] = "*"  # the matrices to change, by their paths in the inner layer
        skip: str = "*router/*"  # matrices to leave out: a router's choice should not change with rounding

        @property
        def in_engine(self) -> bool:
            """True for a wrapper with which an engine computes, too, instead of with its `weights`."""
            return False

        def set(self, **values: Any) -> Self:
            """Set own fields; all others are set in a copy of the inner config."""
            own = {name: values.pop(name) for name in list(values) if name in type(self).__dataclass_fields__}
            inner = own.get("inner", self.__dict__.get("inner"))
            if values and isinstance(inner, ConfigBase):
                own["inner"], values = inner.clone(**values), {}
            return super().set(**own, **values)

        if not TYPE_CHECKING:

            def __getattr__(self, name: str) -> Any:
                inner = self.__dict__.get("inner")
                if isinstance(inner, ConfigBase) and not name.startswith("_"):
                    return getattr(inner, name)  # serves code that reads sizes from a layer's config
                return super().__getattr__(name)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.inner: Any = cfg.inner.build(rngs=rngs)
        self.in_engine = cfg.in_engine
        leaves = jax.tree_util.tree_leaves_with_path(split(self.inner)[1], is_leaf=is_draw)
        named = [(path_name(path), leaf) for path, leaf in leaves]
        matrices = {name: leaf for name, leaf in named if kind_of(name, leaf.ndim) in self.kinds}
        patterns = (cfg.match,) if isinstance(cfg.match, str) else cfg.match
        fitting = [name for name in matrices if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        self.names = tuple(name for name in fitting if not fnmatch.fnmatchcase(name, cfg.skip))
        if not self.names:
            where = path_of(cfg)
            raise UserError(
                f"{where}: no matrix of {type(self.inner).__name__} fits match={cfg.match!r} and not skip={cfg.skip!r}"
                f"{did_you_mean(next(iter(patterns), ''), list(matrices), limit=len(matrices))}"
            )

    def weights(self, params: Params) -> Params:
        """Return the inner layer's parameters as they are to be used; these may be stacks of many layers."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the inner layer returns, computed with `weights`."""
        graphdef, params = split(self.inner)
        return bind(graphdef, self.weights(params))(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("_"):  # copies ask before `inner` exists
            raise AttributeError(name)
        return getattr(self.inner, name)


def plain_config[C: ConfigBase[Any]](model: C, *, engine: bool = False) -> C:
    """Return a copy of a model's config with every wrapper replaced by its inner layer; `engine`: see `in_engine`."""
    plain: Any = model
    while isinstance(plain, Wrapper.Config) and not (engine and plain.in_engine):
        plain = plain.inner
    plain = plain.clone()
    if any(isinstance(cfg, Wrapper.Config) for path, cfg in walk_configs(plain) if path):
        replace(plain, Wrapper.Config, lambda wrapper: wrapper if engine and wrapper.in_engine else wrapper.inner)
    return plain


def plain_params(graphdef: nnx.GraphDef[Any], params: Params, *, engine: bool = False) -> Params:
    """Return parameters for `plain_config` that compute the same: the wrappers' `weights`, whole stacks at once.

    Pure; to be jitted, under the mesh if there is one.
    """

    def unwrapped(module: Any, own: Params) -> Params:
        if isinstance(module, Wrapper) and not (engine and module.in_engine):
            return unwrapped(module.inner, module.weights(own["inner"]))
        return {
            name: unwrapped(getattr(module, name), value) if isinstance(value, dict) else value
            for name, value in own.items()
        }

    return unwrapped(bind(graphdef, params), params)


def projected(layer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the matrices that `project` alone multiplies with, by path: a layer's own, and those of layers in it."""
    return _found(layer, lambda one: one.projected, path)


def grouped(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the stacks of matrices that a grouped product alone multiplies with, by path, as `projected` does."""
    return _found(layer, lambda one: one.grouped, "")


def replaced(params: Params, new: Mapping[str, Any]) -> Params:
    """Return a copy of nested parameters with others at some paths."""

    def leaf(value: Any) -> bool:
        return not isinstance(value, dict)

    return jax.tree_util.tree_map_with_path(lambda path, value: new.get(path_name(path), value), params, is_leaf=leaf)


def _found(layer: Any, names: Callable[[Any], tuple[str, ...]], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in split(layer)[1].items():
        child = getattr(layer, name)
        if isinstance(child, Layer):
            yield from _found(child, names, f"{path}{name}/")
        elif name in names(layer):
            yield path + name, value


def parameter(params: Params, name: str) -> jax.Array:
    """Return the parameter at a path such as `experts/gate_edf`."""
    found: Any = params
    for key in name.split("/"):
        found = found[key]
    return found
