"""Token embedding and output head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.layers.base import Layer, Workload, fan_in_init, param
from axlearn_like.layers.linear import project
from mesh.rules import axis_sizes, partition


class Embedding(Layer):
    """Token table [vocab, dim]; also the output head of models that tie the two."""

    class Config(ConfigBase["Embedding"]):
        dim: int = REQUIRED
        vocab_size: int = REQUIRED
        init_std: float = 0.02

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        init = jax.nn.initializers.truncated_normal(stddev=cfg.init_std)
        self.weight_vd = param(rngs, (cfg.vocab_size, cfg.dim), ("vocab", "embed"), init)

    def __call__(self, tokens_bt: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return the embeddings [batch, length, dim] in `dtype`."""
        table, spec = self.weight_vd[...].astype(dtype), partition("batch", "length", None)
        if spec is None:
            return table[tokens_bt]
        # Each device looks up its columns for the rows of all devices that hold other columns, and they exchange the
        # results: little beside a whole table, and the same in reverse for the gradient.
        columns = axis_sizes("embed")
        rows = tuple(name for name, size in axis_sizes("batch").items() if name not in columns and size > 1) or None
        tokens_bt = jax.sharding.reshard(tokens_bt, PartitionSpec(rows, spec[1]))
        x_btd = table.at[tokens_bt].get(out_sharding=PartitionSpec(rows, spec[1], *(partition("embed") or ())))
        return jax.sharding.reshard(x_btd, spec)

    def flops(self, work: Workload) -> float:
        """Return 0: a lookup multiplies nothing. As a tied head the table counts in `Decoder.flops`."""
        del work
        return 0.0

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """Return float32 logits [batch, length, vocab] by the transposed table."""
        return project(x_btd, self.weight_vd[...].T, out_axis="vocab", dtype=jnp.float32)


class Head(Layer):
    """An untied output head."""

    class Config(ConfigBase["Head"]):
        dim: int = REQUIRED
        vocab_size: int = REQUIRED

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.weight_dv = param(rngs, (cfg.dim, cfg.vocab_size), ("embed", "vocab"), fan_in_init(cfg.dim))

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """Return float32 logits [batch, length, vocab]."""
        return project(x_btd, self.weight_dv[...], out_axis="vocab", dtype=jnp.float32)
