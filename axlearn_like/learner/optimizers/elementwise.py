"""Optimizers that treat every number alone: AdamW, Lion, SGD with momentum, and any transformation of optax.

An optimizer gives only the direction, as an optax transformation: the learner multiplies it by minus the learning rate.
So decoupled weight decay is multiplied by the learning rate too. State has the type and the sharding of the parameters;
state_storage.py reduces it.
"""

from typing import Any, override

import jax
import optax

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, path_of
from axlearn_like.layers.parameter_names import MatrixAxes, kind_of, path_name
from axlearn_like.learner.errors import LearnerError
from axlearn_like.learner.param_labels import Matrices, matrix_labels

# Kinds of parameters without weight decay.
SPARED = ("scale", "bias")


class Decayed(Configurable):
    """Base of optimizers whose direction has decoupled weight decay behind it."""

    def __init__(self, cfg: Any):
        self._cfg = cfg

    def direction(self) -> optax.GradientTransformation:
        """Return the direction before weight decay."""
        raise NotImplementedError

    def transformation(self) -> optax.GradientTransformation:
        """Return the direction, not yet scaled by the learning rate, as an optax transformation."""
        return optax.chain(self.direction(), optax.add_decayed_weights(self._cfg.weight_decay, mask=decay_mask))


class AdamW(Decayed):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101); moments are float32."""

    class Config(ConfigBase["AdamW"]):
        b1: float = 0.9
        b2: float = 0.95
        eps: float = 1e-8
        weight_decay: float = 0.0

        @override
        def check_fields(self) -> None:
            check_betas(self, "b1", "b2")
            self.require("eps", self.eps >= 0, "0 or more")

    @override
    def direction(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(self._cfg.b1, self._cfg.b2, self._cfg.eps)


class Lion(Decayed):
    """The sign of a momentum (Chen et al. 2023, arXiv 2302.06675): one moment.

    Use a learning rate 3 to 10 times lower than for AdamW, and a weight decay as much higher.
    """

    class Config(ConfigBase["Lion"]):
        b1: float = 0.9
        b2: float = 0.99
        weight_decay: float = 0.0

        @override
        def check_fields(self) -> None:
            check_betas(self, "b1", "b2")

    @override
    def direction(self) -> optax.GradientTransformation:
        return optax.scale_by_lion(self._cfg.b1, self._cfg.b2)


class SGD(Decayed):
    """Gradient descent; with `momentum` the trace m <- momentum * m + g (Sutskever et al. 2013), with 0 no state."""

    class Config(ConfigBase["SGD"]):
        momentum: float = 0.9
        nesterov: bool = False
        weight_decay: float = 0.0

        @override
        def check_fields(self) -> None:
            check_betas(self, "momentum")
            self.require("momentum", self.momentum > 0 or not self.nesterov, "above 0 with nesterov")

    @override
    def direction(self) -> optax.GradientTransformation:
        return optax.trace(self._cfg.momentum, self._cfg.nesterov) if self._cfg.momentum else optax.identity()


class Optax(Decayed):
    """Any transformation that gives a direction, by its function: optax's `scale_by_*`, or another library's.

        Optax.Config(direction=config_for(optax.contrib.scale_by_ademamix, b3=0.9999, alpha=5.0))

    It gets whole parameters, which may be stacks and sharded over devices.
    """

    class Config(ConfigBase["Optax"]):
        direction: ConfigBase = REQUIRED
        weight_decay: float = 0.0

    @override
    def direction(self) -> optax.GradientTransformation:
        return built_direction(self._cfg, self._cfg.direction)


class DecayedMatrices(Decayed):
    """Base of optimizers of matrices; `others` is that of embeddings, heads, scales, biases and the rest."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        self._matrices: Matrices = cfg.matrices.build()
        self._others = cfg.others.build()

    @override
    def transformation(self) -> optax.GradientTransformation:
        matrices = super().transformation()
        return optax.partition({"matrices": matrices, "others": self._others.transformation()}, matrix_labels)

    def axes(self, path: tuple[Any, ...], x: jax.Array) -> MatrixAxes:
        """Return the axes that form the matrices of a parameter."""
        found = self._matrices.axes(path_name(path), x.ndim)
        assert found is not None, "every matrix has axes"
        return found


def built_direction(cfg: ConfigBase, direction: ConfigBase) -> optax.GradientTransformation:
    """Return the transformation that a config of an optax function builds.

    Raises:
        LearnerError: it is not a transformation of gradients.
    """
    made = direction.build()
    if not (callable(getattr(made, "init", None)) and callable(getattr(made, "update", None))):
        raise LearnerError(f"{path_of(cfg)}.direction: expected an optax transformation, got {made!r}")
    return made


def check_betas(cfg: ConfigBase, *fields: str) -> None:
    """Refuse decay rates of moments that are not in [0, 1)."""
    for field in fields:
        cfg.require(field, 0 <= getattr(cfg, field) < 1, "0 or more and below 1")


def decay_mask(params: optax.Params) -> optax.Params:
    """Return True for parameters with weight decay: matrices, but not scales and biases.

    The number of axes alone is not enough: the norm scales of a scanned stack are [layers, dim], two axes like a
    matrix. Names decide, because every layer calls these parameters `scale` or `bias` (with the shape suffix, as in
    `q_bias_nh`); arrays with fewer than two axes have no decay, whatever their names.
    """

    def decays(path: tuple[object, ...], leaf: jax.Array) -> bool:
        return leaf.ndim >= 2 and kind_of(path_name(path), leaf.ndim) not in SPARED

    return jax.tree_util.tree_map_with_path(decays, params)
