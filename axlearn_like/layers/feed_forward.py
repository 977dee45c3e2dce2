"""Feed-forward networks, gated (Shazeer 2020, arXiv 2002.05202) and plain."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, override

import jax
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import Layer, fan_in_init, param
from axlearn_like.layers.linear import project
from axlearn_like.remat import checkpoint_name
from mesh.sharding import gather_length

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class SwiGLU(Layer):
    """down(silu(gate(x)) * up(x)) without biases."""

    fixed_order = True

    class Config(ConfigBase["SwiGLU"]):
        dim: int = REQUIRED
        hidden: int = REQUIRED

    projected = ("gate_df", "up_df", "down_fd")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        wide, narrow = fan_in_init(cfg.dim), fan_in_init(cfg.hidden)
        self.gate_df = param(rngs, (cfg.dim, cfg.hidden), ("embed", "hidden"), wide)
        self.up_df = param(rngs, (cfg.dim, cfg.hidden), ("embed", "hidden"), wide)
        self.down_fd = param(rngs, (cfg.hidden, cfg.dim), ("hidden", "embed"), narrow)

    def __call__(self, x_btd: jax.Array, routing: Any = None) -> tuple[jax.Array, Aux]:
        """Return [b, t, d] for [b, t, d]; `routing` is ignored."""
        gathered_btd = gather_length(x_btd)

        def hidden(weight: Any, bias: str) -> jax.Array:
            return self.biased(project(gathered_btd, weight[...], out_axis="hidden"), bias)

        gate = checkpoint_name(hidden(self.gate_df, "gate_bias_f"), "gate")
        up = checkpoint_name(hidden(self.up_df, "up_bias_f"), "up")
        y_btd = project(self.combine(gate, up), self.down_fd[...], in_axis="hidden", like=x_btd)
        return checkpoint_name(self.biased(y_btd, "down_bias_d"), "feed_forward_out"), Aux()

    def biased(self, x: jax.Array, name: str) -> jax.Array:
        """Return the result of a projection with the bias of that name, which `BiasedGLU` has."""
        return x

    def combine(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Return the hidden units."""
        return jax.nn.silu(gate) * up


class GLU(SwiGLU):
    """down(activation(gate(x)) * up(x)) without biases: with gelu_tanh, Gemma's GeGLU."""

    fixed_order = True

    class Config(SwiGLU.Config):
        activation: Activation = "gelu_tanh"

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.activation = cfg.activation

    def combine(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Return the hidden units."""
        return ACTIVATIONS[self.activation](gate) * up


class BiasedGLU(GLU):
    """`GLU` with biases: Llama with `mlp_bias`."""

    fixed_order = True

    class Config(GLU.Config):
        activation: Activation = "silu"

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        zeros = jax.nn.initializers.zeros
        self.gate_bias_f = param(rngs, (cfg.hidden,), ("hidden",), zeros)
        self.up_bias_f = param(rngs, (cfg.hidden,), ("hidden",), zeros)
        self.down_bias_d = param(rngs, (cfg.dim,), (None,), zeros)

    @override
    def biased(self, x: jax.Array, name: str) -> jax.Array:
        """Return the result of a projection with the bias of that name."""
        return x + getattr(self, name)[...].astype(x.dtype)


class FeedForward(Layer):
    """down(activation(up(x))) with biases: GPT-2."""

    fixed_order = True

    class Config(ConfigBase["FeedForward"]):
        dim: int = REQUIRED
        hidden: int = REQUIRED
        activation: Activation = "gelu_tanh"

    projected = ("up_df", "down_fd")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        zeros = jax.nn.initializers.zeros
        self.up_df = param(rngs, (cfg.dim, cfg.hidden), ("embed", "hidden"), fan_in_init(cfg.dim))
        self.up_bias_f = param(rngs, (cfg.hidden,), ("hidden",), zeros)
        self.down_fd = param(rngs, (cfg.hidden, cfg.dim), ("hidden", "embed"), fan_in_init(cfg.hidden))
        self.down_bias_d = param(rngs, (cfg.dim,), (None,), zeros)
        self.activation = cfg.activation

    def __call__(self, x_btd: jax.Array, routing: Any = None) -> tuple[jax.Array, Aux]:
        """Return [b, t, d] for [b, t, d]; `routing` is ignored."""
        up = project(gather_length(x_btd), self.up_df[...], out_axis="hidden")
        up = checkpoint_name(up + self.up_bias_f[...].astype(up.dtype), "up")
        y_btd = project(ACTIVATIONS[self.activation](up), self.down_fd[...], in_axis="hidden", like=x_btd)
        y_btd = y_btd + self.down_bias_d[...].astype(y_btd.dtype)
        return checkpoint_name(y_btd, "feed_forward_out"), Aux()
