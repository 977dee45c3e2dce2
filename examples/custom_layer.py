"""A feed-forward layer of your own in an existing experiment (docs/how-to/add-a-layer.md).

axl train examples/custom_layer.py:squared_relu --set num_steps=20
"""

import jax
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase, replace
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import Layer, fan_in_init, param
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.linear import project
from axlearn_like.training.trainer import Trainer
from experiments.demo.config import demo_sft


class SquaredReLU(Layer):
    """down(relu(up(x))^2), without gate and biases (Primer, So et al. 2021, arXiv 2109.08668)."""

    class Config(ConfigBase["SquaredReLU"]):
        dim: int = REQUIRED  # filled in by the parent, which alone knows it
        hidden: int = REQUIRED

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        # Logical axis names say what a dimension means; the mesh rules say over which mesh axes it is sharded.
        self.up_df = param(rngs, (cfg.dim, cfg.hidden), ("embed", "hidden"), fan_in_init(cfg.dim))
        self.down_fd = param(rngs, (cfg.hidden, cfg.dim), ("hidden", "embed"), fan_in_init(cfg.hidden))

    def __call__(self, x_btd: jax.Array, routing: object = None) -> tuple[jax.Array, Aux]:
        """Map [b, t, d] to [b, t, d]; there is no routing and no auxiliary loss."""
        del routing
        up_btf = project(x_btd, self.up_df[...], out_axis="hidden")
        y_btd = project(jax.nn.relu(up_btf) ** 2, self.down_fd[...], in_axis="hidden", like=x_btd)
        return y_btd, Aux()


def squared_relu(*, seed: int = 0) -> Trainer.Config:
    """Supervised demo with this layer in the place of every SwiGLU, at the same number of parameters."""
    cfg = demo_sft(seed=seed)
    replace(cfg, SwiGLU.Config, lambda swiglu: SquaredReLU.Config(hidden=swiglu.hidden * 3 // 2))
    return cfg
