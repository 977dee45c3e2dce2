"""Gated feed-forward network (SwiGLU, Shazeer 2020, arXiv 2002.05202)."""

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.layers.base import Layer, fan_in_init, param
from mesh.rules import partition


class SwiGLU(Layer):
    """down(silu(gate(x)) * up(x)) without biases."""

    class Config(ConfigBase["SwiGLU"]):
        dim: int = REQUIRED
        hidden: int = REQUIRED

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        wide, narrow = fan_in_init(cfg.dim), fan_in_init(cfg.hidden)
        self.gate_df = param(rngs, (cfg.dim, cfg.hidden), ("embed", "hidden"), wide)
        self.up_df = param(rngs, (cfg.dim, cfg.hidden), ("embed", "hidden"), wide)
        self.down_fd = param(rngs, (cfg.hidden, cfg.dim), ("hidden", "embed"), narrow)

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        def wide(weight_df: jax.Array) -> jax.Array:
            return jnp.einsum(
                "btd,df->btf",
                x_btd,
                weight_df.astype(x_btd.dtype),
                out_sharding=partition("batch", None, "hidden"),
            )

        inner = jax.nn.silu(wide(self.gate_df[...])) * wide(self.up_df[...])
        return jnp.einsum(
            "btf,fd->btd",
            inner,
            self.down_fd[...].astype(x_btd.dtype),
            out_sharding=partition("batch", None, None),
        )
