"""Gated feed-forward network (SwiGLU, Shazeer 2020, arXiv 2002.05202)."""

from typing import Any

import jax
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import Layer, fan_in_init, param
from axlearn_like.layers.linear import project
from axlearn_like.remat import checkpoint_name
from mesh.sharding import gather_length


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

    def __call__(self, x_btd: jax.Array, routing: Any = None) -> tuple[jax.Array, Aux]:
        """Return [b, t, d] for [b, t, d]; `routing` is ignored."""
        del routing
        gathered_btd = gather_length(x_btd)
        gate = checkpoint_name(project(gathered_btd, self.gate_df[...], out_axis="hidden"), "gate")
        up = checkpoint_name(project(gathered_btd, self.up_df[...], out_axis="hidden"), "up")
        y_btd = project(jax.nn.silu(gate) * up, self.down_fd[...], in_axis="hidden", like=x_btd)
        return checkpoint_name(y_btd, "feed_forward_out"), Aux()
