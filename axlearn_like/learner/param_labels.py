"""Which parameters are matrices, and along which axes, as optimizers ask it; the rule is `parameter_names`."""

from typing import Any

import jax

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.layers.parameter_names import KINDS, Kind, MatrixAxes, kind_of, matrix_axes, path_name, shape_suffix
from axlearn_like.learner.errors import LearnerError, where

__all__ = ["KINDS", "Kind", "Matrices", "MatrixAxes", "kind_of", "matrix_labels", "path_name", "shape_suffix"]


def matrix_labels(params: Any) -> Any:
    """Labels every parameter as "matrices" or "others", for `optax.partition`."""

    def label(path: tuple[Any, ...], leaf: jax.Array) -> str:
        return "matrices" if kind_of(path_name(path), leaf.ndim) == "matrix" else "others"

    return jax.tree_util.tree_map_with_path(label, params)


class Matrices(Configurable):
    """Which axes of a weight form its matrices.

    By the letters of its name's suffix, see `parameter_names.matrix_axes`: those in `stack` count separate matrices
    (experts; `"ekq"` makes every attention head a matrix of its own), and `splits` corrects suffixes for which the rule
    is wrong: `{"khr": "kh,r"}`.
    """

    class Config(ConfigBase["Matrices"]):
        stack: str = "e"
        splits: dict[str, str] = {}

    def __init__(self, cfg: Config):
        for suffix, split in cfg.splits.items():
            inputs, comma, outputs = split.partition(",")
            if not (inputs and comma and outputs and inputs + outputs == suffix):
                place = f"{where(cfg)}.splits[{suffix!r}]"
                raise LearnerError(f"{place}: expected its letters cut in two by a comma, got {split!r}")
        self._stack, self._splits = cfg.stack, cfg.splits

    def axes(self, name: str, ndim: int) -> MatrixAxes | None:
        """Of an embedding, head or matrix; None for parameters that are none."""
        return matrix_axes(name, ndim, self._stack, self._splits)

    def block(self, name: str, ndim: int) -> tuple[int, ...]:
        """The axes of one of the arrays that a stack consists of: of a matrix, or of a vector for a stack of these."""
        axes = self.axes(name, ndim)
        if axes is not None:
            return axes.inputs + axes.outputs
        own = len(shape_suffix(name, ndim)) or (1 if kind_of(name, ndim) in ("scale", "bias") else ndim)
        return tuple(range(ndim - min(own, ndim), ndim))
