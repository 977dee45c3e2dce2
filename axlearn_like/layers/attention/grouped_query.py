"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): projections around a context.

The layer projects, normalises and rotates; which tokens see which, and where keys and values are stored, is decided by
the context (layers/contexts/). So training, scoring, prefill and decoding run this one layer.

Shape letters: b batch, t length, d model width, k key/value heads, q query heads per key/value head, h head width.
"""

import math
from typing import Any, TypeGuard, override

import jax
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
from axlearn_like.kernels.attention.dispatch import AttentionParams, FirstSupported
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.layers.attention.joined_heads import joined_heads, joins_heads
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.base import Layer, Workload, fan_in_init, param
from axlearn_like.layers.contexts.latents import LatentContext
from axlearn_like.layers.contexts.packed import Context
from axlearn_like.layers.linear import project
from axlearn_like.layers.norm import RMSNorm
from axlearn_like.layers.wrappers.low_rank.rank_space import RankSpace
from axlearn_like.remat import checkpoint_name
from mesh.errors import UserError
from mesh.rules import axis_sizes
from mesh.sharding import gather_length

# Weights that may be passed with their head axes merged into one, [d, k * q * h], as the TPU compiler multiplies them:
# it would have to copy the others, whose last two axes are tiled.
MERGEABLE = ("q_dkqh", "k_dkh", "v_dkh")


class Attention(Layer):
    """Multi-head attention with `num_heads` query heads sharing `num_kv_heads` key/value heads.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from axlearn_like.layers.attention.grouped_query import Attention
    >>> from axlearn_like.layers.contexts.packed import PackedContext
    >>> attention = Attention.Config(dim=64, num_heads=4, num_kv_heads=2).build(rngs=nnx.Rngs(0))
    >>> context = PackedContext(jnp.arange(3)[None], jnp.ones((1, 3), int))  # positions, segment ids
    >>> result, cache = attention(jnp.ones((1, 3, 64)), context, None)
    >>> result.shape
    (1, 3, 64)
    """

    fixed_order = True

    class Config(ConfigBase["Attention"]):
        dim: int = REQUIRED
        num_heads: int = REQUIRED
        num_kv_heads: int | None = None  # number of key and value heads; None: num_heads
        head_dim: int | None = None  # width of a head; None: dim / num_heads
        qkv_bias: bool = False  # biases of query, key and value, as in Qwen 2 and 2.5
        qk_norm: RMSNorm.Config | None = None  # norms of queries and keys, as in Qwen 3
        rope: ConfigBase = Rope.Config()  # RoPE, or another layer with `rotation`, e.g. NoPositions
        causal: bool = True
        window: int | None = None  # tokens that a query sees, its own included; None: all up to its own
        soft_cap: float | None = None  # scores become cap * tanh(score / cap); Gemma 2
        scale: float | None = None  # factor of scores; None: head_dim ** -0.5
        sinks: bool = False  # a learned score for each head that takes weight and adds no value; gpt-oss
        kernel: ConfigBase = FirstSupported.Config()
        context_parallel: ConfigBase = AllGather.Config()  # AllGather or Ring over the mesh axis `sequence`

        @override
        def check_fields(self) -> None:
            each = self.num_kv_heads or self.num_heads
            self.require("num_heads", self.num_heads % each == 0, f"a multiple of num_kv_heads={each}")
            divides = self.head_dim is not None or self.dim % self.num_heads == 0
            self.require("dim", divides, f"a multiple of num_heads={self.num_heads}")

    projected = ("q_dkqh", "k_dkh", "v_dkh", "out_kqhd")
    unrounded = ("sinks_kq",)
    out_bias_d: nnx.Param[jax.Array] | None = None  # `BiasedAttention` has one

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        kv_heads = cfg.num_kv_heads or cfg.num_heads
        check_heads_divide("Attention: num_kv_heads", kv_heads)
        head_dim = cfg.head_dim or cfg.dim // cfg.num_heads
        self.cache_shape = (kv_heads, head_dim)  # shape of one token's keys, and of its values
        per_kv = cfg.num_heads // kv_heads
        self.query_shape, self.value_dim = (kv_heads, per_kv, head_dim), head_dim
        init, kv_shape = fan_in_init(cfg.dim), (cfg.dim, kv_heads, head_dim)
        kv_axes = ("embed", "heads", None)
        self.q_dkqh = param(rngs, (cfg.dim, kv_heads, per_kv, head_dim), ("embed", "heads", None, None), init)
        self.k_dkh = param(rngs, kv_shape, kv_axes, init)
        self.v_dkh = param(rngs, kv_shape, kv_axes, init)
        self.out_kqhd = param(
            rngs,
            (kv_heads, per_kv, head_dim, cfg.dim),
            ("heads", None, None, "embed"),
            fan_in_init(cfg.num_heads * head_dim),
        )
        zeros = jax.nn.initializers.zeros

        def bias(shape: tuple[int, ...]) -> nnx.Param[jax.Array] | None:
            axes = ("heads", *[None] * (len(shape) - 1))
            return param(rngs, shape, axes, zeros) if cfg.qkv_bias else None

        def head_norm() -> RMSNorm | None:
            return cfg.qk_norm and cfg.qk_norm.clone(dim=head_dim).build(rngs=rngs)

        self.q_bias_kqh = bias((kv_heads, per_kv, head_dim))
        self.k_bias_kh = bias((kv_heads, head_dim))
        self.v_bias_kh = bias((kv_heads, head_dim))
        self.q_norm, self.k_norm = head_norm(), head_norm()
        self.rope = cfg.rope.clone(head_dim=head_dim).build(rngs=rngs)
        self.rules = ScoreRules(causal=cfg.causal, window=cfg.window, soft_cap=cfg.soft_cap, scale=cfg.scale)
        self.kernel, self.context_parallel = cfg.kernel.build(), cfg.context_parallel.build()
        self.sinks_kq = param(rngs, (kv_heads, per_kv), ("heads", None), zeros) if cfg.sinks else None

    def __call__(self, x_btd: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Return the output [b, t, d] and the layer's cache as updated by the context (None in training)."""
        if joins_heads(self, x_btd, context) and not _holds_latents(context, cache):
            q, k, v = joined_heads(self, x_btd, context.positions)
            mixed, cache = context.attend(q, k, v, cache, self._attention)
            return self._output(mixed, x_btd), cache
        gathered_btd = gather_length(x_btd)

        def heads(weight: nnx.Param, bias: nnx.Param | None, shape: tuple[int, ...]) -> jax.Array:
            y = project(gathered_btd, weight[...], out_axis="heads", out=shape)
            return y if bias is None else y + bias[...].astype(y.dtype)

        q = heads(self.q_dkqh, self.q_bias_kqh, self.query_shape)
        if _holds_latents(context, cache):
            return self._attend_rank_space(q, x_btd, context, cache)
        k = heads(self.k_dkh, self.k_bias_kh, self.cache_shape)
        v = heads(self.v_dkh, self.v_bias_kh, self.cache_shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rotate = self.rope.rotation(context.positions)
        q, k, v = checkpoint_name(rotate(q), "query"), checkpoint_name(rotate(k), "key"), checkpoint_name(v, "value")
        mixed, cache = context.attend(q, k, v, cache, self._attention)
        return self._output(mixed, x_btd), cache

    @property
    def _attention(self) -> AttentionParams:
        sinks = None if self.sinks_kq is None else self.sinks_kq[...]
        return AttentionParams(self.rules, self.kernel, self.context_parallel, sinks)

    def _attend_rank_space(
        self, q: jax.Array, x_btd: jax.Array, context: LatentContext, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Return the layer's output where the cache holds tokens in the rank space of keys and values."""
        q = q if self.q_norm is None else self.q_norm(q)
        q, low = self.rope.rotation(context.positions)(q), self.window_keys.of(x_btd)
        mixed, cache = context.attend_latents(q, low, cache, self._attention, self.window_keys)
        return self._output(mixed, x_btd), cache

    @property
    def window_keys(self) -> RankSpace:
        """The function that makes keys and values of a cache in rank space, as windows of decoding hold them."""
        return RankSpace(self)

    def _output(self, mixed: jax.Array, x_btd: jax.Array) -> jax.Array:
        out = project(mixed, self.out_kqhd[...], inputs=3, in_axis="heads", like=x_btd)
        if self.out_bias_d is not None:
            out = out + self.out_bias_d[...].astype(out.dtype)
        return checkpoint_name(out, "attention_out")

    def flops(self, work: Workload) -> float:
        """Return the FLOPs of the projections and of both products of attention."""
        return super().flops(work) + attention_flops(self.query_shape, self.value_dim, work.pairs(self.rules.window))


class BiasedAttention(Attention):
    """Attention with a bias on its output projection too: GPT-2, gpt-oss."""

    fixed_order = True

    class Config(Attention.Config):
        qkv_bias: bool = True

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.out_bias_d = param(rngs, (cfg.dim,), (None,), jax.nn.initializers.zeros)


def _holds_latents(context: Context, cache: Any) -> TypeGuard[LatentContext]:
    return isinstance(context, LatentContext) and context.holds_latents(cache)


def attention_flops(query_shape: tuple[int, int, int], value_dim: int, pairs: float) -> float:
    """Return the FLOPs of queries with keys, and of the sum over values, for so many pairs of a query and a key."""
    kv_heads, per_kv, width = query_shape
    return 2.0 * pairs * kv_heads * per_kv * (width + value_dim)


def check_heads_divide(name: str, heads: int) -> None:
    """Refuse key/value heads that do not divide over the mesh: a head is not split, nor separated from its query heads.

    Raises:
        UserError: the number of heads does not divide; the message has the name of the field.
    """
    sizes = axis_sizes("heads")
    if heads % math.prod(sizes.values()):
        over = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(f"{name}={heads} do not divide evenly over the mesh ({over})")
