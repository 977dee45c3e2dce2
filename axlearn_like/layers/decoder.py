"""The decoder: embedding, a scanned stack of pre-norm blocks, final norm, head.

Llama, Qwen and the like are configs of this one class (see models/).
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.aux import Aux, reduce_layers
from axlearn_like.layers.base import Layer, Workload, cast_late
from axlearn_like.layers.contexts.packed import Context
from axlearn_like.layers.embedding import Embedding, Head
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.norm import RMSNorm
from axlearn_like.layers.pipeline import Pipeline, shard_layers
from axlearn_like.remat import checkpoint, checkpoint_name, find_remat
from mesh.errors import UserError
from mesh.sharding import gather_length, shard_residual


class Block(Layer):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    class Config(ConfigBase["Block"]):
        dim: int = REQUIRED
        norm: RMSNorm.Config = RMSNorm.Config()
        attention: ConfigBase = Attention.Config()
        feed_forward: ConfigBase = SwiGLU.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attention_norm = cfg.norm.clone(dim=cfg.dim).build(rngs=rngs)
        self.attention = cfg.attention.clone(dim=cfg.dim).build(rngs=rngs)
        self.feed_forward_norm = cfg.norm.clone(dim=cfg.dim).build(rngs=rngs)
        self.feed_forward = cfg.feed_forward.clone(dim=cfg.dim).build(rngs=rngs)
        self.cache_shape: tuple[int, int] = self.attention.cache_shape

    def __call__(
        self, x_btd: jax.Array, context: Context, cache: Any, routing: Any = None
    ) -> tuple[jax.Array, Any, Aux]:
        """Return the block's output [b, t, d], the updated cache, and the feed-forward layer's auxiliary outputs."""
        x_btd = checkpoint_name(x_btd, "block_input")
        mixed, cache = self.attention(self.attention_norm(x_btd), context, cache)
        x_btd = x_btd + mixed
        y_btd, aux = self.feed_forward(self.feed_forward_norm(x_btd), routing)
        return x_btd + y_btd, cache, aux


class Hidden(NamedTuple):
    """The result of the stack of blocks.

    Attributes:
        x: final hidden states [batch, length, dim], normalised.
        cache: as updated by the context.
        aux: of all layers.
    """

    x: jax.Array
    cache: Any
    aux: Aux


class Decoder(Layer):
    """A causal language model over `vocab_size` tokens."""

    class Config(ConfigBase["Decoder"]):
        vocab_size: int = REQUIRED
        dim: int = REQUIRED
        num_layers: int = REQUIRED
        embedding: Embedding.Config = Embedding.Config()
        block: ConfigBase = Block.Config()
        norm: RMSNorm.Config = RMSNorm.Config()
        head: Head.Config | None = None  # None: tied to the embedding
        dtype: Literal["float32", "bfloat16"] = "float32"  # of activations; parameters are float32
        pipeline: Pipeline.Config = Pipeline.Config()  # used where the mesh has a pipeline axis
        scan_unroll: int = 1  # layers per iteration of the scan: more runs faster and compiles slower
        remat: str | dict[str, Literal["save", "offload"]] = "nothing"  # recomputed in the backward pass (remat.py)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        sizes = {"dim": cfg.dim, "vocab_size": cfg.vocab_size}
        self.embedding = cfg.embedding.clone(**sizes).build(rngs=rngs)
        block = cfg.block.clone(dim=cfg.dim)
        keys = jax.random.split(rngs.params(), cfg.num_layers)
        self.layers: Any = shard_layers(jax.vmap(lambda key: block.build(rngs=nnx.Rngs(key)))(keys), cfg.num_layers)
        self.norm = cfg.norm.clone(dim=cfg.dim).build(rngs=rngs)
        self.head = None if cfg.head is None else cfg.head.clone(**sizes).build(rngs=rngs)
        self.num_layers, self.vocab_size, self.dim = cfg.num_layers, cfg.vocab_size, cfg.dim
        self.cache_shape: tuple[int, int] = self.layers.cache_shape  # key/value heads and their width
        self.dtype = jnp.dtype(cfg.dtype)
        self.remat, self.scan_unroll = cfg.remat, cfg.scan_unroll
        self.pipeline = cfg.pipeline.build()
        find_remat(cfg.remat)  # refused here, before anything is compiled

    def __call__(self, tokens_bt: jax.Array, context: Context) -> jax.Array:
        """Return float32 logits [batch, length, vocab]."""
        return self.logits(self.hidden(tokens_bt, context).x)

    def hidden(self, tokens_bt: jax.Array, context: Context, cache: Any = None, routing: Any = None) -> Hidden:
        """Return final hidden states, the cache as updated by the context, and the layers' auxiliary outputs.

        Args:
            tokens_bt: int32 [batch, length].
            context: which tokens see which.
            cache: None; or a tuple with one pytree per layer (the loop is then unrolled); or one pytree for all layers,
                passed from layer to layer as (cache, layer index), so that a large pool is updated in place.
            routing: int32 [layers, batch, length, top_k], experts to be used again (see `Aux`); None: routers choose.
        """
        x = self.embedding(tokens_bt, self.dtype)
        if cache is None:
            x = shard_residual(x)

        def apply(
            carry: tuple[jax.Array, Any], each: tuple[Block, Any, Any], context: Context = context
        ) -> tuple[Any, Aux]:
            (x, cache), (layer, index, routing) = carry, each
            if cache is None:
                x, _, aux = cast_late(layer, index, self.dtype)(x, context, None, routing)
                return (x, None), aux
            x, (cache, _), aux = layer(x, context, (cache, index), routing)
            return (x, cache), aux

        if isinstance(cache, tuple):
            caches = []
            for layer, layer_cache in zip(self._unstacked(), cache, strict=True):
                x, layer_cache, _ = layer(x, context, layer_cache)
                caches.append(layer_cache)
            return Hidden(self.norm(x), tuple(caches), Aux())
        if isinstance(self.layers, tuple):
            for index, layer in enumerate(self.layers):
                (x, cache), _ = apply((x, cache), (layer, jnp.int32(index), None))
            return Hidden(self.norm(x), cache, Aux())
        apply = checkpoint(apply, find_remat(self.remat))
        if self.pipeline.stages > 1:
            return self._pipelined(apply, x, context, cache, routing)
        stack = (self.layers, jnp.arange(self.num_layers), routing)
        (x, cache), aux = jax.lax.scan(apply, (x, cache), stack, unroll=self.scan_unroll)
        return Hidden(gather_length(self.norm(x)), cache, reduce_layers(aux))

    def _pipelined(self, apply: Any, x: jax.Array, context: Context, cache: Any, routing: Any) -> Hidden:
        if cache is not None or routing is not None:
            raise UserError(
                "Decoder: a mesh with a pipeline axis is for training; expected neither a cache nor routing"
            )

        def stage(layers: Any, x: jax.Array, context: Context) -> tuple[jax.Array, Aux]:
            (x, _), aux = jax.lax.scan(partial(apply, context=context), (x, None), (layers, None, None))
            return x, aux

        x, aux = self.pipeline(stage, self.layers, x, context)
        return Hidden(gather_length(self.norm(x)), None, aux)

    def flops(self, work: Workload) -> float:
        """Return the FLOPs of all layers, which are alike, and of the logits."""
        layer = self.layers[0] if isinstance(self.layers, tuple) else jax.tree.map(lambda leaf: leaf[0], self.layers)
        return self.num_layers * layer.flops(work) + 2.0 * work.outputs * self.vocab_size * self.dim

    def unstack(self) -> "Decoder":
        """Return the model with its layers in a list: XLA's CPU backend copies each weight it slices from a stack."""
        self.layers = nnx.data(tuple(self._unstacked()))
        return self

    def _unstacked(self) -> list[Block]:
        if isinstance(self.layers, tuple):
            return list(self.layers)
        return [jax.tree.map(lambda leaf, i=index: leaf[i], self.layers) for index in range(self.num_layers)]

    @property
    def output(self) -> Embedding | Head:
        """The layer that makes logits."""
        return self.head or self.embedding

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """Return float32 logits of hidden states, so that callers compute them only where they need them."""
        return self.output.logits(x_btd)
