"""The decoder: embedding, a scanned stack of pre-norm blocks, final norm, head.

Llama, Qwen, Gemma and the like are configs of this one class (see models/).
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.kernels.exact.scope import Numerics, refuse_exact
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.aux import Aux, concat_layers, only_routing, reduce_layers
from axlearn_like.layers.base import Layer, Workload, cast_late
from axlearn_like.layers.block_pattern import BlockStack, Segment, scan_segment
from axlearn_like.layers.contexts.packed import Context
from axlearn_like.layers.embedding import Embedding, Head
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.heads import EmbeddingHead, ScoreHead
from axlearn_like.layers.moe.replicas import placed_layer
from axlearn_like.layers.moe.routing import mark_padding
from axlearn_like.layers.norm import LayerNorm, RMSNorm
from axlearn_like.layers.pipeline import Pipeline
from axlearn_like.layers.wrappers.base import Wrapper
from axlearn_like.layers.wrappers.low_rank.matrices import current_dropout_key, dropout_layer
from axlearn_like.layers.wrappers.stacked import keep_in_stack
from axlearn_like.remat import checkpoint_name, find_remat
from mesh.errors import UserError
from mesh.programs.shared import traced_once, unknown_indices
from mesh.sharding import gather_length, shard_residual


class Block(Layer):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    fixed_order = True

    class Config(ConfigBase["Block"]):
        dim: int = REQUIRED
        norm: RMSNorm.Config | LayerNorm.Config = RMSNorm.Config()
        attention: ConfigBase = Attention.Config()
        feed_forward: ConfigBase = SwiGLU.Config()

    attention_post_norm: Any = None  # `SandwichBlock` has both
    feed_forward_post_norm: Any = None

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attention_norm = cfg.norm.clone(dim=cfg.dim).build(rngs=rngs)
        self.attention = cfg.attention.clone(dim=cfg.dim).build(rngs=rngs)
        self.feed_forward_norm = cfg.norm.clone(dim=cfg.dim).build(rngs=rngs)
        self.feed_forward = cfg.feed_forward.clone(dim=cfg.dim).build(rngs=rngs)
        self.cache_shape: tuple[int, int] = self.attention.cache_shape
        self.latent_width: int | None = getattr(self.attention, "latent_width", None)
        self.window_shape: tuple[int, int] = getattr(self.attention, "window_shape", self.cache_shape)

    def __call__(
        self, x_btd: jax.Array, context: Context, cache: Any, routing: Any = None
    ) -> tuple[jax.Array, Any, Aux]:
        """Return the block's output [b, t, d], the updated cache, and the feed-forward layer's auxiliary outputs."""
        x_btd = checkpoint_name(x_btd, "block_input")
        mixed, cache = self.attention(self.attention_norm(x_btd), context, cache)
        x_btd = x_btd + (mixed if self.attention_post_norm is None else self.attention_post_norm(mixed))
        if not getattr(self.feed_forward, "route_padding", True):  # a mixture of experts, maybe wrapped
            routing = mark_padding(routing, context, x_btd)
        y_btd, aux = self.feed_forward(self.feed_forward_norm(x_btd), routing)
        y_btd = y_btd if self.feed_forward_post_norm is None else self.feed_forward_post_norm(y_btd)
        return x_btd + y_btd, cache, aux


class SandwichBlock(Block):
    """A block with norms behind attention and feed-forward layer too: Gemma 2 and 3."""

    fixed_order = True

    def __init__(self, cfg: Block.Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.attention_post_norm = cfg.norm.clone(dim=cfg.dim).build(rngs=rngs)
        self.feed_forward_post_norm = cfg.norm.clone(dim=cfg.dim).build(rngs=rngs)


def _from_stack(layers: Any, applies: list[Any], first: int, dtype: Any) -> tuple[Any, list[Any]]:
    """Return a stack without the matrices that kernels read, and functions of its slices whose layers read them there.

    As they were, where there are none.
    """
    rest, layer = keep_in_stack(layers, dtype)
    if layer is None:
        return layers, applies

    def reading(apply: Any) -> Any:
        return lambda carry, each: apply(carry, (layer(each[0], each[1] - first), *each[1:]))

    return rest, [reading(apply) for apply in applies]


class Hidden(NamedTuple):
    """The result of the stack of blocks."""

    x: jax.Array  # final hidden states [batch, length, dim], normalised
    cache: Any  # cache as updated by the context
    aux: Aux  # auxiliary losses of all layers


class Decoder(BlockStack):
    """A causal language model over `vocab_size` tokens.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from axlearn_like.layers.contexts.packed import PackedContext
    >>> from models.tiny import tiny
    >>> decoder = tiny(vocab_size=272, dim=64, num_layers=2).build(rngs=nnx.Rngs(0))
    >>> context = PackedContext(jnp.arange(4)[None], jnp.ones((1, 4), int))  # positions, segment ids
    >>> decoder(jnp.array([[5, 6, 7, 8]]), context).shape
    (1, 4, 272)
    """

    fixed_order = True

    class Config(ConfigBase["Decoder"]):
        vocab_size: int = REQUIRED
        dim: int = REQUIRED
        num_layers: int = REQUIRED
        embedding: Embedding.Config | Wrapper.Config = Embedding.Config()
        block: ConfigBase = Block.Config()  # one layer, used for all; BlockPattern.Config if layers differ
        norm: RMSNorm.Config | LayerNorm.Config = RMSNorm.Config()
        # Output layer; None: tied to the embedding. A head without logits makes it no language model, see heads.py.
        head: Head.Config | ScoreHead.Config | EmbeddingHead.Config | Wrapper.Config | None = None
        dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of activations; parameters are float32
        pipeline: Pipeline.Config = Pipeline.Config()  # pipeline parallelism, used if the mesh has a pipeline axis
        scan_unroll: int = 1  # layers per iteration of the scan: more runs faster and compiles slower
        remat: str | dict[str, Literal["save", "offload"]] = "nothing"  # recomputation in the backward pass (remat.py)
        # "exact": a token's bits, where it is sampled or scored, depend on its sequence alone (kernels/exact/scope.py)
        numerics: Numerics = "default"

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        sizes = {"dim": cfg.dim, "vocab_size": cfg.vocab_size}
        self.embedding: Any = cfg.embedding.clone(**sizes).build(rngs=rngs)
        self.build_blocks(cfg.block, cfg.dim, jax.random.split(rngs.params(), cfg.num_layers))
        self.norm = cfg.norm.clone(dim=cfg.dim).build(rngs=rngs)
        sizes = {"dim": cfg.dim} if isinstance(cfg.head, ScoreHead.Config | EmbeddingHead.Config) else sizes
        self.head: Any = None if cfg.head is None else cfg.head.clone(**sizes).build(rngs=rngs)
        self.vocab_size, self.dim = cfg.vocab_size, cfg.dim
        self.dtype = jnp.dtype(cfg.dtype)
        self.remat, self.scan_unroll = cfg.remat, cfg.scan_unroll
        self.numerics: Numerics = cfg.numerics
        self.pipeline = cfg.pipeline.build()
        find_remat(cfg.remat)  # refused here, before anything is compiled

    def __call__(self, tokens_bt: jax.Array, context: Context) -> jax.Array:
        """Return float32 logits [batch, length, vocab], or what another head makes of each token."""
        x_btd = self.hidden(tokens_bt, context).x
        return self.scores(x_btd, context) if self.scoring else self.logits(x_btd)

    def hidden(self, tokens_bt: jax.Array, context: Context, cache: Any = None, routing: Any = None) -> Hidden:
        """Return final hidden states, the cache as updated by the context, and the layers' auxiliary outputs.

        Args:
            tokens_bt: int32 [batch, length].
            context: which tokens see which.
            cache: None; or a tuple with one pytree per layer (the loop is then unrolled); or one pytree for all layers,
                passed from layer to layer as (cache, layer index), so that a large pool is updated in place.
            routing: int32 [layers, batch, length, top_k], experts to be used again (see `Aux`); None: routers choose.
        """
        x = self.embedding(tokens_bt, self.dtype, context)
        if cache is None:
            x = shard_residual(x)

        def apply(
            carry: tuple[jax.Array, Any],
            each: tuple[Block, Any, Any],
            context: Context = context,
            segment: Segment = self.segments[0],
            kind: int = 0,
        ) -> tuple[Any, Aux]:
            (x, cache), (layer, index, routing) = carry, each
            layer = segment.block(layer, kind)
            if cache is None:
                with dropout_layer(index), placed_layer(index):
                    x, _, aux = cast_late(layer, index, self.dtype)(x, context, None, routing)
                return (x, None), aux
            x, (cache, _), aux = layer(x, context, (cache, index), routing)
            return (x, cache), aux

        if isinstance(cache, tuple):
            caches, found = [], []
            run = traced_once(lambda layer, *args: layer(*args))
            for index, (layer, layer_cache) in enumerate(zip(self.blocks(), cache, strict=True)):
                x, layer_cache, aux = run(layer, x, context, layer_cache, None if routing is None else routing[index])
                caches.append(layer_cache)
                found.append(aux)
            return Hidden(self.norm(x), tuple(caches), only_routing(found))
        if isinstance(self.layers, tuple):
            found = []
            run = traced_once(apply)
            indices = unknown_indices(len(self.layers))
            for number, (layer, index) in enumerate(zip(self.layers, indices, strict=True)):
                part = None if routing is None else routing[number]
                (x, cache), aux = run((x, cache), (layer, index, part))
                found.append(aux)
            return Hidden(self.norm(x), cache, only_routing(found))
        if self.pipeline.stages > 1:
            return self._pipelined(apply, x, context, cache, routing)
        found, carry = [], (x, cache)
        for segment in self.segments:
            own = slice(segment.first, segment.first + segment.count)
            part = routing if routing is None or len(self.segments) == 1 else routing[own]
            layers, applies = getattr(self, segment.name), self._applies(apply, segment)
            if cache is not None:
                layers, applies = _from_stack(layers, applies, segment.first, self.dtype)
            indices = jnp.arange(segment.count)
            stack = (layers, indices + segment.first if segment.first else indices, part)
            carry, aux = scan_segment(applies, carry, stack, unroll=self.scan_unroll, remat=find_remat(self.remat))
            found.append(aux)
        (x, cache), aux = carry, concat_layers(found, [segment.count for segment in self.segments])
        return Hidden(gather_length(self.norm(x)), cache, reduce_layers(aux))

    def _applies(self, apply: Any, segment: Segment, **fixed: Any) -> list[Any]:
        """Return `apply` for each kind of block of a segment."""
        return [partial(apply, segment=segment, kind=kind, **fixed) for kind in range(segment.period)]

    def _pipelined(self, apply: Any, x: jax.Array, context: Context, cache: Any, routing: Any) -> Hidden:
        refuse_exact("a pipeline")
        if cache is not None or routing is not None:
            raise UserError(
                "Decoder: a mesh with a pipeline axis is for training; expected neither a cache nor routing"
            )
        if current_dropout_key() is not None:
            raise UserError(
                "LoRA.dropout: expected 0 on a mesh with a pipeline axis, whose stages do not know their layers"
            )
        (segment,), stages = self.segments, self.pipeline.stages
        if segment.count // stages % segment.period:
            raise UserError(
                f"Decoder: num_layers={self.num_layers} in {stages} pipeline stages; expected a multiple of "
                f"{segment.period} layers a stage, for so many blocks are the pattern"
            )

        def stage(layers: Any, x: jax.Array, context: Context) -> tuple[jax.Array, Aux]:
            applies = self._applies(apply, segment, context=context)
            (x, _), aux = scan_segment(applies, (x, None), (layers, None, None), remat=find_remat(self.remat))
            return x, aux

        x, aux = self.pipeline(stage, self.layers, x, context)
        return Hidden(gather_length(self.norm(x)), None, aux)

    def flops(self, work: Workload) -> float:
        """Return the FLOPs of all layers and of the logits."""
        layers = self.layers_flops(work)
        if isinstance(self.head, ScoreHead | EmbeddingHead):
            return layers + self.head.flops(work)
        return layers + 2.0 * work.outputs * self.vocab_size * self.dim

    @property
    def scoring(self) -> bool:
        """True for a head that makes scores, or embeddings, instead of logits."""
        return isinstance(self.head, ScoreHead | EmbeddingHead)

    @property
    def output(self) -> Embedding | Head:
        """The layer that makes logits. UserError: there is none."""
        if isinstance(self.head, ScoreHead | EmbeddingHead):
            kind = type(self.head).__name__
            raise UserError(
                f"Decoder.Config.head: {kind} makes no logits; expected Head.Config, or None for a tied one"
            )
        return self.head or self.embedding

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """Return float32 logits of hidden states, so that callers compute them only where they need them."""
        return self.output.logits(x_btd)

    def scores(self, x_btd: jax.Array, context: Context) -> jax.Array:
        """Return what a head of heads.py makes of hidden states, float32. UserError: the decoder has none."""
        if not isinstance(self.head, ScoreHead | EmbeddingHead):
            head = "the tied embedding" if self.head is None else type(self.head).__name__
            raise UserError(f"Decoder.Config.head: {head} scores no tokens; expected ScoreHead.Config")
        return self.head(x_btd, context)
