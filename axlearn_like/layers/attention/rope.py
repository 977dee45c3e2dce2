"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-split convention as in Llama and Qwen.

A position embedding of attention is a layer with `rotation`: the function applied to queries and keys at their
positions. Any layer with that method can replace `Rope`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.kernels.deterministic import each, no_fuse
from axlearn_like.layers.attention.rope_scaling import DynamicScaling, LongRopeScaling
from axlearn_like.layers.base import Layer
from axlearn_like.remat import always_saved
from mesh.devices import platform


class Llama3Scaling(Configurable):
    """The frequency scaling by which Llama 3.1 and later stretch their context window.

    Wavelengths longer than `original_length / low_freq_factor` are slowed down by `factor`, those shorter than
    `original_length / high_freq_factor` are kept, and those between are interpolated.
    """

    class Config(ConfigBase["Llama3Scaling"]):
        factor: float = 8.0
        low_freq_factor: float = 1.0
        high_freq_factor: float = 4.0
        original_length: int = 8192

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __call__(self, freq: np.ndarray) -> np.ndarray:
        """Return the scaled frequencies."""
        c = self.cfg
        wavelength = 2 * math.pi / freq
        smooth = (c.original_length / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * freq / c.factor + smooth * freq


class Rope(Layer):
    """Rotation of the two halves of each head by position-dependent angles."""

    fixed_order = True

    class Config(ConfigBase["Rope"]):
        head_dim: int = REQUIRED
        theta: float = 10_000.0
        scaling: ConfigBase | None = None  # scaling of the frequencies (rope_scaling.py)
        max_length: int | None = None  # positions of the pretrained model; longer rows and engines are refused

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        freq = cfg.theta ** (-np.arange(0, cfg.head_dim, 2, dtype=np.float64) / cfg.head_dim)
        scaling = None if cfg.scaling is None else cfg.scaling.build()
        if scaling is not None:
            freq = scaling(freq, cfg.max_length) if isinstance(scaling, LongRopeScaling) else scaling(freq)
        self.freq = tuple(float(f) for f in freq)
        self.factor: float = getattr(scaling, "attention_factor", 1.0)  # factor of cosines and sines
        self.growth = scaling.growth if isinstance(scaling, DynamicScaling) else None

    def __call__(self, positions_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return cosines and sines, float32 [batch, length, head_dim / 2], for `rotate`."""
        angle = positions_bt.astype(jnp.float32)[..., None] * jnp.asarray(self.freq, jnp.float32)
        if self.growth is not None:
            angle = angle * self.growth(positions_bt, len(self.freq))
        cos, sin = each(jnp.cos, angle), each(jnp.sin, angle)
        return (cos, sin) if self.factor == 1 else (cos * self.factor, sin * self.factor)

    def rotation(self, positions_bt: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """Return the function that rotates queries and keys [batch, length, heads..., head_dim]."""
        cos, sin = map(always_saved, self(positions_bt))
        return lambda x: rotate(x, cos, sin)


class InterleavedRope(Rope):
    """Rotation of neighbouring pairs instead of halves, as DeepSeek's published weights want it."""

    fixed_order = True

    def rotation(self, positions_bt: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """Return the function that rotates queries and keys [batch, length, heads..., head_dim]."""
        halves = super().rotation(positions_bt)
        # Left in halves: scores do not depend on an order that queries and keys share.
        return lambda x: halves(jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1))


class NoPositions(Layer):
    """No rotation: only the causal mask tells the order of tokens (Kazemnejad et al. 2023, arXiv 2305.19466)."""

    fixed_order = True

    class Config(ConfigBase["NoPositions"]):
        head_dim: int = REQUIRED  # handed down; not used

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        del cfg, rngs

    def rotation(self, positions_bt: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """Return the identity."""
        return lambda x: x


def rotate(x_btkh: jax.Array, cos_bth: jax.Array, sin_bth: jax.Array) -> jax.Array:
    """Apply the rotation to [batch, length, heads..., head_dim], in float32."""
    heads = x_btkh.ndim - 3
    shape = (*cos_bth.shape[:2], *(1,) * heads, cos_bth.shape[-1])
    cos, sin = cos_bth.reshape(shape), sin_bth.reshape(shape)
    first, second = jnp.split(x_btkh.astype(jnp.float32), 2, axis=-1)
    out = _joined(first * cos - second * sin, second * cos + first * sin)
    return out.astype(x_btkh.dtype)


def _joined(first: jax.Array, second: jax.Array) -> jax.Array:
    """Return two halves side by side on the last axis."""
    if platform() != "cpu":
        return jnp.concatenate([first, second], axis=-1)
    # XLA's CPU backend compiles a concatenation for each place where it stands, this one ten times as fast.
    # Barriers keep the products from being fused with it, or its users, as a concatenation does: their bits stay.
    halves = no_fuse(jnp.stack([no_fuse(first), no_fuse(second)]))
    return jnp.moveaxis(halves, 0, -2).reshape(*first.shape[:-1], -1)
