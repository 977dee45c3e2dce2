"""Heads that score tokens, or pool them, in the place of a decoder's output head.

`decoder.set(head=ScoreHead.Config())` makes a value or a reward model of any family, `ScoreHead.Config(outputs=5)` a
classifier of five classes, `EmbeddingHead.Config()` an encoder of texts. The decoder's other parameters keep their
paths, so it can start from a language model (`StartFrom` with `NewHead`).

Every position has the result of the sequence up to it, so that of a whole sequence is at its last token. This needs no
second layout for packed rows: a value or process-reward model is read at many tokens, an outcome-reward model at one.
"""

from typing import Any, Literal, override

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.layers.base import Layer, fan_in_init, param
from axlearn_like.layers.contexts.packed import Context, require_complete_rows
from axlearn_like.layers.linear import project
from mesh.rules import partition

Pooling = Literal["last", "mean", "cls"]


class ScoreHead(Layer):
    """Linear scores of each token's pooled hidden state."""

    class Config(ConfigBase["ScoreHead"]):
        dim: int = REQUIRED
        outputs: int = 1  # scores of a token: 1 for values and rewards, the number of classes for a classifier
        bias: bool = False
        pooling: Pooling = "last"  # see `pool`

        @override
        def check_fields(self) -> None:
            self.require_least(1, "outputs")

    bias: nnx.Param[jax.Array] | None = None

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        # Named like an output head: optimizers for matrices (Muon) leave both to AdamW.
        self.weight_dv = param(rngs, (cfg.dim, cfg.outputs), ("embed", None), fan_in_init(cfg.dim))
        if cfg.bias:
            self.bias = param(rngs, (cfg.outputs,), (None,), jax.nn.initializers.zeros)
        self.pooling: Pooling = cfg.pooling

    def __call__(self, x_btd: jax.Array, context: Context) -> jax.Array:
        """Return float32 scores [batch, length, outputs]."""
        scores = project(pool(x_btd, context, self.pooling), self.weight_dv[...], dtype=jnp.float32)
        return scores if self.bias is None else scores + self.bias[...].astype(jnp.float32)


class EmbeddingHead(Layer):
    """Pooled hidden states, normalised to length 1 unless `normalise` is off; no parameters."""

    class Config(ConfigBase["EmbeddingHead"]):
        dim: int = REQUIRED
        pooling: Pooling = "last"  # see `pool`
        normalise: bool = True

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.pooling: Pooling = cfg.pooling
        self.normalise = cfg.normalise

    def __call__(self, x_btd: jax.Array, context: Context) -> jax.Array:
        """Return float32 embeddings [batch, length, dim]."""
        pooled = pool(x_btd, context, self.pooling).astype(jnp.float32)
        if not self.normalise:
            return pooled
        squares = jnp.sum(pooled * pooled, axis=-1, keepdims=True)
        return pooled * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


def pool(x_btd: jax.Array, context: Context, pooling: Pooling) -> jax.Array:
    """Return for each token the pooled hidden states of its sequence up to it, [batch, length, dim].

    Args:
        context: positions restart at 0 with each sequence of a row.
        pooling: `last`: the token's own state. `mean`: of all tokens. `cls`: the first token's, which has seen the
            others only where attention is not causal.

    Raises:
        UserError: the mesh shards the length of rows, and tokens are to be pooled.
    """
    if pooling == "last":
        return x_btd
    require_complete_rows(context)
    places = jnp.arange(x_btd.shape[1])
    first = (places - context.positions)[:, :, None]
    if pooling == "cls":
        taken = (places == first).astype(jnp.float32)
    else:
        taken = (places >= first) & (places <= places[:, None])
        taken = taken / (context.positions[:, :, None] + 1).astype(jnp.float32)
    # A product with few nonzero weights: exact enough in float32, and rows stay where they are on a mesh.
    spec: Any = partition("batch", None, None)
    highest = jax.lax.Precision.HIGHEST
    pooled = jnp.einsum("bts,bsd->btd", taken, x_btd.astype(jnp.float32), precision=highest, out_sharding=spec)
    return pooled.astype(x_btd.dtype)
