"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.layers.base import Layer, param
from axlearn_like.layers.deterministic import no_fuse, sum_of_squares


class RMSNorm(Layer):
    """Root-mean-square normalisation over the last axis, x / rms(x) * scale, in float32 whatever the type of x."""

    class Config(ConfigBase["RMSNorm"]):
        dim: int = REQUIRED
        eps: float = 1e-6

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.eps = cfg.eps
        self.scale = param(rngs, (cfg.dim,), (None,), jax.nn.initializers.ones)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalised x, in the type of x."""
        x32 = x.astype(jnp.float32)
        rms = jnp.sqrt(sum_of_squares(x32) / x.shape[-1] + self.eps)
        # Not fused, this stays a division: as rsqrt, XLA's CPU code rounds vectors and remainders differently.
        normed = x32 * (1.0 / no_fuse(rms))
        return (normed * self.scale[...]).astype(x.dtype)
