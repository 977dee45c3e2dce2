"""Kind and matrix axes of a parameter, by its name.

Parameters carry the letters of their axes as a suffix (`q_dkqh`: d inputs; k, q and h outputs). Axes in front of these
are stacks: a scanned decoder's `q_dkqh` is [layers, d, k, q, h], as many matrices as there are layers. A name without a
suffix (`scale`, `bias`) has one axis of its own.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import jax

Kind = Literal["embedding", "head", "matrix", "scale", "bias", "other"]
KINDS: tuple[Kind, ...] = ("embedding", "head", "matrix", "scale", "bias", "other")


class MatrixAxes(NamedTuple):
    """Positions of the axes of an array of matrices: matrix products contract `inputs`."""

    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def path_name(path: tuple[Any, ...]) -> str:
    """Return the path of an array in nested dicts: its keys, joined by slashes."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def without(params: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return nested parameters without those at some paths, and without dicts that are then empty."""

    def kept(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, part in tree.items():
            if not isinstance(part, Mapping):
                if path + key not in names:
                    found[key] = part
            elif below := kept(part, f"{path}{key}/"):
                found[key] = below
        return found

    return kept(params, "")


def only(params: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return nested parameters with those at some paths alone."""
    every = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    return without(params, every.difference(names))


def merged(params: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested parameters with the paths of both; where both have one, that of `others`."""
    both = {key: merged(params[key], value) for key, value in others.items() if isinstance(params.get(key), Mapping)}
    return {**params, **others, **both}


def shape_suffix(name: str, ndim: int) -> str:
    """Return the axis letters at the end of a parameter's name, or "" if it has none: `down_fd` -> `fd`."""
    words = name.rpartition("/")[2].split("_")
    suffix = words[-1]
    letters = suffix.isascii() and suffix.isalpha() and suffix.islower()
    return suffix if len(words) > 1 and letters and 1 <= len(suffix) <= ndim and "scale" != suffix != "bias" else ""


def kind_of(name: str, ndim: int) -> Kind:
    """Return the kind of the parameter with this name (or path) and number of axes.

    Scales and biases are recognised by a word of the name, whatever their axes; attention sinks are biases (of a
    softmax). With a suffix of two letters or more it is an `embedding` if the suffix begins with v (vocabulary), a
    `head` if it ends with v, else a `matrix`. Everything else is `other`.
    """
    words = set(name.rpartition("/")[2].split("_"))
    if "scale" in words:
        return "scale"
    if words & {"bias", "sink", "sinks"}:
        return "bias"
    suffix = shape_suffix(name, ndim)
    if len(suffix) < 2:
        return "other"
    return "embedding" if suffix[0] == "v" else "head" if suffix[-1] == "v" else "matrix"


def is_matrix(name: str, ndim: int) -> bool:
    """Return True for a parameter of one layer that takes part in matrix products."""
    return ndim > 1 and kind_of(name, ndim) not in ("scale", "bias")


def axes_of_matrix(name: str, ndim: int) -> MatrixAxes:
    """Return `matrix_axes` of what is known to be an embedding, head or matrix."""
    axes = matrix_axes(name, ndim)
    assert axes is not None, f"{name} is no matrix"
    return axes


def matrix_axes(name: str, ndim: int, stack: str = "e", splits: Mapping[str, str] | None = None) -> MatrixAxes | None:
    """Return the input and output axes of an embedding, head or matrix; None for other parameters.

    Letters in `stack` count separate matrices (experts) as long as two others remain. The model width d, and the rank l
    of low-rank factors, are alone on their side of the product: `q_dkqh` is [d, k*q*h], `out_kqhd` is [k*q*h, d].
    Without one of them at the end the first letter is the input. `splits` overrides this for suffixes for which it is
    wrong: `{"khr": "kh,r"}`.
    """
    if kind_of(name, ndim) not in ("embedding", "head", "matrix"):
        return None
    suffix = shape_suffix(name, ndim)
    own = [letter for letter in suffix if letter not in stack]
    stacked = stack if len(own) >= 2 else ""
    positions = {i: letter for i, letter in enumerate(suffix, ndim - len(suffix)) if letter not in stacked}
    letters = "".join(positions.values())
    if splits and letters in splits:
        count = splits[letters].index(",")
    else:
        count = len(letters) - 1 if letters[-1] in "dl" else 1
    axes = tuple(positions)
    stack_axes = tuple(axis for axis in range(ndim) if axis not in positions)
    return MatrixAxes(stack_axes, axes[:count], axes[count:])
