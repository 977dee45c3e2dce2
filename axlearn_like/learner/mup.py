"""Maximal-update parametrisation: learning rates found on a narrow model, transferred to a wide one."""

import math
from typing import Any, override

import jax
import optax

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, path_of
from axlearn_like.layers.parameter_names import kind_of, path_name, shape_suffix
from axlearn_like.learner.errors import LearnerError
from axlearn_like.learner.param_labels import Matrices
from mesh.errors import did_you_mean


class MuP(Configurable):
    """Learning rates of matrices and heads times base fan-in / fan-in (Yang et al. 2022, arXiv 2203.03466, table 3).

    This is the rule for AdamW, Lion and others whose updates do not depend on the size of gradients; embeddings, scales
    and biases keep the rate. `base` has the sizes of the model on which the rate was found, by axis letter: `{"d": 256,
    "f": 1024}`; letters that are not in it do not grow. The paper's other conditions on the model (a head that starts
    smaller, attention scaled by 1 / width) belong to the model's config. With decoupled decay, a matrix's decay shrinks
    with its rate.
    """

    class Config(ConfigBase["MuP"]):
        base: dict[str, int] = REQUIRED
        matrices: Matrices.Config = Matrices.Config()

        @override
        def check_fields(self) -> None:
            fits = bool(self.base) and all(len(letter) == 1 and size >= 1 for letter, size in self.base.items())
            self.require("base", fits, "sizes of 1 or more by axis letter, such as {'d': 256}")

    def __init__(self, cfg: Config):
        self._base, self._where = cfg.base, path_of(cfg)
        self._matrices: Matrices = cfg.matrices.build()

    def transformation(self) -> optax.GradientTransformation:
        """Return the scaling of directions as an optax transformation."""
        return optax.stateless(lambda updates, _: jax.tree.map(lambda u, f: u * f, updates, self.factors(updates)))

    def factors(self, params: Any) -> Any:
        """Return the factor of the learning rate of every parameter.

        Raises:
            LearnerError: `base` has a letter that is an input of no parameter.
        """
        seen: set[str] = set()

        def factor(path: tuple[Any, ...], p: jax.Array) -> float:
            name = path_name(path)
            axes = self._matrices.axes(name, p.ndim)
            if axes is None or kind_of(name, p.ndim) == "embedding":
                return 1.0
            suffix = shape_suffix(name, p.ndim)
            letters = {axis: suffix[axis - p.ndim + len(suffix)] for axis in axes.inputs}
            seen.update(letters.values())
            return math.prod(self._base.get(letter, p.shape[axis]) / p.shape[axis] for axis, letter in letters.items())

        factors = jax.tree_util.tree_map_with_path(factor, params)
        for letter in self._base:
            if letter not in seen:
                hint = did_you_mean(letter, seen)
                raise LearnerError(f"{self._where}.base: {letter!r} is an input axis of no parameter{hint}")
        return factors
