"""Labels of parameters for optimizers: which are matrices, and along which axes (see `layers.parameter_names`)."""

from typing import Any, override

import jax

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.layers.parameter_names import MatrixAxes, kind_of, matrix_axes, path_name, shape_suffix


def matrix_labels(params: Any) -> Any:
    """Return "matrices" or "others" for every parameter, for `optax.partition`."""

    def label(path: tuple[Any, ...], leaf: jax.Array) -> str:
        return "matrices" if kind_of(path_name(path), leaf.ndim) == "matrix" else "others"

    return jax.tree_util.tree_map_with_path(label, params)


class Matrices(Configurable):
    """The axes that form the matrices of a weight.

    Chosen by the letters of its name's suffix, see `parameter_names.matrix_axes`: those in `stack` count separate
    matrices (experts; `"ekq"` makes every attention head a separate matrix), and `splits` corrects suffixes for which
    the rule is wrong: `{"khr": "kh,r"}`.
    """

    class Config(ConfigBase["Matrices"]):
        stack: str = "e"
        splits: dict[str, str] = {}

        @override
        def check_fields(self) -> None:
            for suffix, split in self.splits.items():
                inputs, comma, outputs = split.partition(",")
                fits = inputs and comma and outputs and inputs + outputs == suffix
                self.require("splits", bool(fits), f"the letters of {suffix!r} split in two by a comma")

    def __init__(self, cfg: Config):
        self._stack, self._splits = cfg.stack, cfg.splits

    def axes(self, name: str, ndim: int) -> MatrixAxes | None:
        """Return the axes of an embedding, head or matrix; None for other parameters."""
        return matrix_axes(name, ndim, self._stack, self._splits)

    def block(self, name: str, ndim: int) -> tuple[int, ...]:
        """Return the axes of one matrix, or of one vector, of a stack."""
        axes = self.axes(name, ndim)
        if axes is not None:
            return axes.inputs + axes.outputs
        own = len(shape_suffix(name, ndim)) or (1 if kind_of(name, ndim) in ("scale", "bias") else ndim)
        return tuple(range(ndim - min(own, ndim), ndim))
