"""Bounds on gradients other than by their global norm (`Learner.Config.clip_norm`); spikes of it are skipped."""

from typing import Any, override

import jax
import jax.numpy as jnp
import optax

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.layers.parameter_names import path_name
from axlearn_like.learner.param_labels import Matrices


class ClipByValue(Configurable):
    """Clipping of every entry of the gradient to [-limit, limit]."""

    class Config(ConfigBase["ClipByValue"]):
        limit: float = REQUIRED

        @override
        def check_fields(self) -> None:
            self.require("limit", self.limit > 0, "above 0")

    def __init__(self, cfg: Config):
        self._limit = cfg.limit

    def transformation(self) -> optax.GradientTransformation:
        """Return the clipping of gradients as an optax transformation."""
        return optax.clip(self._limit)


class ClipByBlockRMS(ClipByValue):
    """Clipping of the root mean square of every matrix and vector to `limit`: of each layer of a stack alone."""

    class Config(ClipByValue.Config):
        matrices: Matrices.Config = Matrices.Config()

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._matrices: Matrices = cfg.matrices.build()

    @override
    def transformation(self) -> optax.GradientTransformation:
        def clip(path: tuple[Any, ...], g: jax.Array) -> jax.Array:
            block = self._matrices.block(path_name(path), g.ndim)
            rms = jnp.sqrt(jnp.mean(jnp.square(g.astype(jnp.float32)), axis=block, keepdims=True))
            return (g / jnp.maximum(1.0, rms / self._limit)).astype(g.dtype)

        return optax.stateless(lambda grads, _: jax.tree_util.tree_map_with_path(clip, grads))


class SkipSpikes(Configurable):
    """A gradient norm above `factor` times the running mean of earlier ones is a spike: its update is skipped.

    A spike enters the mean as `factor` times the mean. So when norms have risen for good, as after a change of data,
    the mean follows and updates continue after some skipped ones.
    """

    class Config(ConfigBase["SkipSpikes"]):
        factor: float = 5.0
        decay: float = 0.98  # decay of the mean, per finite gradient
        warmup: int = 100  # finite gradients before the first that can be a spike

        @override
        def check_fields(self) -> None:
            self.require("factor", self.factor > 1, "above 1")
            self.require("decay", 0 <= self.decay < 1, "0 or more and below 1")
            self.require("warmup", self.warmup >= 1, "1 or more")

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def init(self) -> dict[str, jax.Array]:
        """Return the state: `mean` (of norms, not debiased), `seen` gradients and `spikes` among them."""
        zero = jnp.zeros((), jnp.int32)
        return {"mean": jnp.zeros((), jnp.float32), "seen": zero, "spikes": zero}

    def update(
        self, norm: jax.Array, finite: jax.Array, state: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return True if `norm` is a spike, and the new state; a norm that is not finite changes nothing."""
        cfg, seen = self._cfg, state["seen"]
        mean = state["mean"] / (1 - cfg.decay ** jnp.maximum(seen, 1))
        spike = finite & (seen >= cfg.warmup) & (norm > cfg.factor * mean)
        counted = jnp.where(spike, cfg.factor * mean, norm)
        new = cfg.decay * state["mean"] + (1 - cfg.decay) * counted
        return spike, {
            "mean": jnp.where(finite, new, state["mean"]),
            "seen": seen + finite.astype(jnp.int32),
            "spikes": state["spikes"] + spike.astype(jnp.int32),
        }
