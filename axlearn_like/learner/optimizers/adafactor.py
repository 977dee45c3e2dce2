"""Adafactor: second moments as the product of a row's and a column's (Shazeer & Stern 2018, arXiv 1804.04235)."""

import math
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
import optax

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.layers.parameter_names import path_name
from axlearn_like.learner.optimizers.elementwise import check_betas, decay_mask
from axlearn_like.learner.param_labels import Matrices


class Unfactored(NamedTuple):
    """The second moment of a parameter that is not factored."""

    nu: jax.Array


class Factored(NamedTuple):
    """Means of the second moment of every matrix over its outputs, and over its inputs."""

    inputs: jax.Array
    outputs: jax.Array


class AdafactorState(NamedTuple):
    """Number of updates, and an `Unfactored` or `Factored` for every parameter."""

    count: jax.Array
    nu: Any


class Adafactor(Configurable):
    """Adafactor, matrix by matrix: a stack of layers gets the updates of separate layers.

    Not optax's, which chooses the two largest axes of an array to factor over, one of which may be the stack's, and
    clips and scales by root mean squares over all layers together: for a stack of layers that is another optimizer. For
    single matrices the updates are equal (tests compare them), except that optax does not multiply weight decay by the
    rate.
    """

    class Config(ConfigBase["Adafactor"]):
        decay_rate: float = 0.8  # the second moment's decay is 1 - count ** -decay_rate
        eps: float = 1e-30  # added to squared gradients
        clip_rms: float | None = 1.0  # limit of a block's update RMS; None: no clipping
        min_param_rms: float | None = 1e-3  # the update is scaled by the block's rms, at least this; None: not scaled
        min_size: int = 128  # matrices with a shorter side are not factored
        momentum: float | None = None  # decay of the first moment; None: no first moment
        weight_decay: float = 0.0
        matrices: Matrices.Config = Matrices.Config()

        @override
        def check_fields(self) -> None:
            self.require("decay_rate", 0 < self.decay_rate <= 1, "above 0, at most 1")
            self.require_least(0, "eps", "min_param_rms")
            self.require("clip_rms", self.clip_rms is None or self.clip_rms > 0, "above 0, or None")
            self.require_least(1, "min_size")
            if self.momentum is not None:
                check_betas(self, "momentum")

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._matrices: Matrices = cfg.matrices.build()

    def transformation(self) -> optax.GradientTransformation:
        """Return the direction, not yet scaled by the learning rate, as an optax transformation."""
        momentum = [] if self._cfg.momentum is None else [optax.ema(self._cfg.momentum, debias=False)]
        return optax.chain(
            optax.GradientTransformation(self._init, self._update),
            *momentum,
            optax.add_decayed_weights(self._cfg.weight_decay, mask=decay_mask),
        )

    def _factors(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return input and output axes of a parameter that is factored; None for others."""
        axes = self._matrices.axes(path_name(path), len(shape))
        if axes is None:
            return None
        sides = axes.inputs, axes.outputs
        large = all(math.prod(shape[axis] for axis in side) >= self._cfg.min_size for side in sides)
        return sides if large else None

    def _init(self, params: Any) -> AdafactorState:
        def moment(path: tuple[Any, ...], p: jax.Array) -> Unfactored | Factored:
            sides, zeros = self._factors(path, p.shape), jnp.zeros_like(p)
            if sides is None:
                return Unfactored(zeros)
            return Factored(jnp.mean(zeros, axis=sides[1]), jnp.mean(zeros, axis=sides[0]))

        return AdafactorState(jnp.zeros((), jnp.int32), jax.tree_util.tree_map_with_path(moment, params))

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, AdafactorState]:
        beta = 1.0 - (state.count + 1).astype(jnp.float32) ** -self._cfg.decay_rate

        def one(path: tuple[Any, ...], g: jax.Array, nu: Unfactored | Factored, p: jax.Array) -> Any:
            sides = self._factors(path, g.shape)
            update, nu = (
                _unfactored(g, nu, beta, self._cfg.eps)
                if isinstance(nu, Unfactored)
                else _factored(g, nu, beta, self._cfg.eps, *(sides or ((), ())))
            )
            return self._scaled(update, p, self._matrices.block(path_name(path), g.ndim)), nu

        both = jax.tree_util.tree_map_with_path(one, updates, state.nu, params)
        made, nu = (jax.tree.map(lambda _, pair, i=i: pair[i], updates, both) for i in (0, 1))
        return made, AdafactorState(state.count + 1, nu)

    def _scaled(self, update: jax.Array, p: jax.Array, block: tuple[int, ...]) -> jax.Array:
        if self._cfg.clip_rms is not None:
            update = update / jnp.maximum(1.0, _rms(update, block) / self._cfg.clip_rms)
        if self._cfg.min_param_rms is not None:
            update = update * jnp.maximum(self._cfg.min_param_rms, _rms(p, block))
        return update


def _unfactored(g: jax.Array, nu: Unfactored, beta: jax.Array, eps: float) -> tuple[jax.Array, Unfactored]:
    moment = (beta * nu.nu + (1 - beta) * (g * g + eps)).astype(nu.nu.dtype)
    return g * jax.lax.rsqrt(moment), Unfactored(moment)


def _factored(
    g: jax.Array, nu: Factored, beta: jax.Array, eps: float, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> tuple[jax.Array, Factored]:
    """Return equation 4: the moment of an entry is (its row's * its column's) / the mean of the rows'."""
    square = g * g + eps
    rows = (beta * nu.inputs + (1 - beta) * jnp.mean(square, axis=outputs)).astype(nu.inputs.dtype)
    columns = (beta * nu.outputs + (1 - beta) * jnp.mean(square, axis=inputs)).astype(nu.outputs.dtype)
    rows_expanded = jnp.expand_dims(rows, outputs)
    ratio = rows_expanded / jnp.mean(rows_expanded, axis=inputs, keepdims=True)
    return g * jax.lax.rsqrt(ratio) * jax.lax.rsqrt(jnp.expand_dims(columns, inputs)), Factored(rows, columns)


def _rms(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))
