"""LoRA adapters apart from their base model: the factors of one, and a bank of many in places of one shape.

A bank has, for each matrix of a model that can be adapted, factors [slots, in, rank] and [slots, rank, out]. Slot 0 is
the base: zeros. A smaller rank is padded with zeros, and a matrix that an adapter leaves alone has zeros.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.config import ConfigBase
from axlearn_like.layers.base import Params, build_abstract
from axlearn_like.layers.parameter_names import axes_of_matrix, path_name
from axlearn_like.layers.wrappers.base import Wrapper, plain_config, projected
from axlearn_like.layers.wrappers.lora import LoRA, factor_names
from axlearn_like.layers.wrappers.low_rank.matrices import RowAdapted
from mesh.errors import UserError, did_you_mean


class Factors(NamedTuple):
    """Both factors of a matrix, with other axes in front: layers, slots."""

    a: Any  # [..., in, rank]
    b: Any  # [..., rank, out]


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter: float32 factors [layers, in, rank] and [layers, rank, out] by the path of their stack of matrices.

    Paths are those of the plain model, such as `layers/attention/q_dkqh`. Scales are in `b`.
    """

    factors: Mapping[str, Factors]

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(factors.a.shape[-1] for factors in self.factors.values())


class Matrix(NamedTuple):
    """A stack of matrices that can be adapted: its sizes, and the sharding of its first input and output axis."""

    layers: int
    inputs: int
    outputs: int
    sharding: tuple[Any, Any]


def adapter_of(model: ConfigBase[Any], params: Params) -> Adapter:
    """Return the adapter of a model with LoRA layers.

    Args:
        params: parameters of the decoder; only the factors are read, and nothing else has to be there.

    Raises:
        UserError: it has other wrappers than LoRA, or none, or factors of matrices that cannot be adapted row by row.
    """
    built = build_abstract(model)
    plain = build_abstract(plain_config(model))
    known = dict(matrices(plain))
    arrays = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    found: dict[str, Factors] = {}
    for path, place, layer in walk_wrappers(built):
        if not isinstance(layer, LoRA):
            raise UserError(f"{path}{type(layer).__name__}: an adapter is of LoRA layers alone")
        if layer.magnitudes:
            raise UserError(
                f"{path}magnitudes (DoRA) scale what the base adds, too, and cannot be adapted row by row; expected "
                "LoRA, or a model with the adapter merged"
            )
        for name in layer.names:
            if path + name not in known:
                shown = ", ".join(sorted(known)[:8]) or "a model whose layers multiply by `project`"
                raise UserError(
                    f"{path}{name} cannot be adapted row by row: tokens of all rows share it at once, as experts "
                    f"and matrices of cached latents are; expected {shown}, or a model with the adapter merged"
                )
            found[path + name] = _factors(layer, name, known[path + name].layers, arrays, f"{place}lora/")
    if not found:
        raise UserError("this model has no LoRA layers: it has no adapter")
    return Adapter(found)


def matrices(model: Any, match: tuple[str, ...] = ("*",)) -> Iterator[tuple[str, Matrix]]:
    """Yield the matrices of a plain decoder that can be adapted, by path; it may be abstract."""
    for segment in model.segments:
        for path, leaf in projected(getattr(model, segment.name), f"{segment.name}/"):
            if not any(fnmatch.fnmatchcase(path, pattern) for pattern in match):
                continue
            axes = axes_of_matrix(path, leaf.ndim)
            inputs, outputs = (math.prod(leaf.shape[axis] for axis in side) for side in (axes.inputs, axes.outputs))
            spec = getattr(getattr(leaf, "sharding", None), "spec", None) or (None,) * leaf.ndim
            yield path, Matrix(leaf.shape[0], inputs, outputs, (spec[axes.inputs[0]], spec[axes.outputs[0]]))


def check_fits(adapter: Adapter, known: Mapping[str, Matrix], rank: int) -> None:
    """Refuse an adapter that a bank of these matrices and this rank cannot take.

    Raises:
        UserError: it adapts other matrices, or matrices of other sizes; its rank is larger; or it is not all numbers.
    """
    if adapter.rank > rank:
        raise UserError(f"it has rank {adapter.rank}; the bank takes {rank} and less")
    for path, (a, b) in adapter.factors.items():
        if path not in known:
            raise UserError(f"it adapts {path}, which the bank has no room for{did_you_mean(path, known)}")
        matrix, rank = known[path], a.shape[-1]
        expected = ((matrix.layers, matrix.inputs, rank), (matrix.layers, rank, matrix.outputs))
        if (a.shape, b.shape) != expected:
            raise UserError(
                f"its factors of {path} are {a.shape} and {b.shape}, for this model they would be {expected[0]} and "
                f"{expected[1]}: it was made for another base"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise UserError(f"its factors of {path} are not all numbers")


def padded(adapter: Adapter, known: Mapping[str, Matrix], rank: int) -> Params:
    """Return the factors of all matrices of a bank, nested, in its rank."""
    tree: Params = {}
    for path, matrix in known.items():
        a = np.zeros((matrix.layers, matrix.inputs, rank), np.float32)
        b = np.zeros((matrix.layers, rank, matrix.outputs), np.float32)
        if (found := adapter.factors.get(path)) is not None:
            own = found.a.shape[-1]
            a[..., :own], b[:, :own] = found
        insert(tree, path, Factors(a, b))
    return tree


def adapted(params: Params, bank: Params, slots: jax.Array, *, stacked: bool) -> Params:
    """Return parameters of the model in which every row of a batch has the adapter of its slot.

    Args:
        bank: factors in the places of their matrices, as many as there are slots.
        slots: int32 [rows].
        stacked: layers are the first axis of all arrays; slots are then the second one of the bank's.
    """

    def of(own: Any, part: Any) -> Any:
        if isinstance(part, Factors):
            rows = [jnp.take(factor, slots, axis=int(stacked), mode="clip") for factor in part]
            return RowAdapted(own, *rows)
        return {**own, **{key: of(own[key], value) for key, value in part.items()}}

    return of(params, bank)


def insert(tree: Params, path: str, value: Any) -> None:
    """Set the value at a path of nested dicts."""
    *folders, last = path.split("/")
    for key in folders:
        tree = tree.setdefault(key, {})
    tree[last] = value


def walk_wrappers(module: Any, path: str = "", place: str = "") -> Iterator[tuple[str, str, Wrapper]]:
    """Yield (path in the plain model, path here, wrapper) of all wrappers."""
    from axlearn_like.layers.base import Layer

    if isinstance(module, Wrapper):
        yield path, place, module
        yield from walk_wrappers(module.inner, path, f"{place}inner/")
        return
    for name, child in vars(module).items():
        if isinstance(child, Layer):
            yield from walk_wrappers(child, f"{path}{name}/", f"{place}{name}/")


def _factors(layer: LoRA, name: str, layers: int, arrays: Mapping[str, Any], folder: str) -> Factors:
    names = factor_names(name, len(name.rpartition("_")[2]))
    for one in (names.a, names.b):
        if folder + one not in arrays:
            raise UserError(f"factor {folder}{one} is missing")
    a, b = (np.asarray(arrays[folder + one], np.float32) for one in (names.a, names.b))
    a = a.reshape(layers, -1, a.shape[-1])
    return Factors(a, b.reshape(layers, a.shape[-1], -1) * np.float32(layer.scale))
