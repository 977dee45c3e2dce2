"""Normalisation over the last axis, in float32 whatever the type of x."""

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.kernels.deterministic import no_fuse, row_sum, sum_of_squares
from axlearn_like.layers.base import Layer, param


class RMSNorm(Layer):
    """Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467): x / rms(x) * scale."""

    fixed_order = True
    unrounded = ("scale",)

    class Config(ConfigBase["RMSNorm"]):
        dim: int = REQUIRED
        eps: float = 1e-6

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.eps = cfg.eps
        self.scale = param(rngs, (cfg.dim,), (None,), jax.nn.initializers.ones)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalised x, in the type of x."""
        x32 = x.astype(jnp.float32)
        rms = jnp.sqrt(sum_of_squares(x) / x.shape[-1] + self.eps)
        # Not fused, this stays a division: as rsqrt, XLA's CPU code rounds vectors and remainders differently.
        normed = x32 * (1.0 / no_fuse(rms))
        return (normed * self.factor).astype(x.dtype)

    @property
    def factor(self) -> jax.Array:
        """The factors of the normalised numbers, [dim]."""
        return self.scale[...]


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + scale): the scale begins at 0, so that weight decay pulls towards a plain norm (Gemma)."""

    fixed_order = True

    def __init__(self, cfg: RMSNorm.Config, *, rngs: nnx.Rngs):
        self.eps = cfg.eps
        self.scale = param(rngs, (cfg.dim,), (None,), jax.nn.initializers.zeros)

    @property
    def factor(self) -> jax.Array:
        """The factors of the normalised numbers, [dim]."""
        return 1.0 + self.scale[...]


class LayerNorm(Layer):
    """Layer normalisation (Ba et al. 2016, arXiv 1607.06450): (x - mean) / deviation * scale + bias (GPT-2)."""

    fixed_order = True
    unrounded = ("scale", "bias")

    class Config(ConfigBase["LayerNorm"]):
        dim: int = REQUIRED
        eps: float = 1e-5

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.eps = cfg.eps
        self.scale = param(rngs, (cfg.dim,), (None,), jax.nn.initializers.ones)
        self.bias = param(rngs, (cfg.dim,), (None,), jax.nn.initializers.zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalised x, in the type of x."""
        x32 = x.astype(jnp.float32)
        centred = no_fuse(x32 - row_sum(x32) / x.shape[-1])
        deviation = jnp.sqrt(sum_of_squares(centred) / x.shape[-1] + self.eps)
        normed = no_fuse(centred * (1.0 / no_fuse(deviation)) * self.scale[...])
        return (normed + self.bias[...]).astype(x.dtype)
