"""Bounds on gradients other than by their global norm (`Learner.Config.clip_norm`)."""

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
