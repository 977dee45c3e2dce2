"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1.2-2.1.3): keys and values from one small vector.

A token's keys and values are projections of a normalised latent of `kv_rank` numbers; positions use a separate part of
queries and keys, `rope_dim` wide, whose keys are shared by all heads. A cache of XLA's contexts holds latent and shared
key alone (contexts/latents.py); the kernel for TPUs caches keys and values of all heads, as plain attention does.

* `decode="expanded"`: keys and values are computed again from the latents, as in training: the same to the bit.
* `decode="absorbed"`: the projection of keys is folded into the queries, that of values into the output (2.1.2 of the
  paper), so decoding attends to the latents as one key/value head. It sums in another order than training.

Shape letters: b batch, t length, d model width, k heads, q = 1, r rank of a latent, h head width, w width of what is
cached.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, override

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
from axlearn_like.kernels.attention.dispatch import AttentionParams, FirstSupported
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.exact.scope import refuse_exact
from axlearn_like.layers.attention.grouped_query import attention_flops, check_heads_divide
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.base import Layer, Workload, fan_in_init, param
from axlearn_like.layers.contexts.latents import LatentContext
from axlearn_like.layers.contexts.packed import Context
from axlearn_like.layers.linear import project
from axlearn_like.layers.norm import RMSNorm
from axlearn_like.remat import checkpoint_name
from mesh.errors import UserError
from mesh.rules import axis_sizes
from mesh.sharding import gather_length

Rotation = Callable[[jax.Array], jax.Array]


class LatentAttention(Layer):
    """A replacement for `Attention`. The defaults are DeepSeek-V2's and V3's, except for `q_rank` (1536)."""

    fixed_order = True

    class Config(ConfigBase["LatentAttention"]):
        dim: int = REQUIRED
        num_heads: int = REQUIRED
        q_rank: int | None = None  # width of the queries' latent; None: no latent (V2-Lite)
        kv_rank: int = 512
        nope_dim: int = 128  # the part of a query or key head without positions
        rope_dim: int = 64  # the part with them
        value_dim: int = 128
        norm: RMSNorm.Config = RMSNorm.Config()  # norm of latents
        rope: ConfigBase = Rope.Config()  # RoPE, or another layer with `rotation`, e.g. NoPositions
        window: int | None = None  # tokens that a query sees, its own included; None: all up to its own
        decode: Literal["expanded", "absorbed"] = "expanded"  # arithmetic on cached latents: as trained, or cheap
        scale: float | None = None  # factor of scores; None: (nope_dim + rope_dim) ** -0.5
        kernel: ConfigBase = FirstSupported.Config()
        context_parallel: ConfigBase = AllGather.Config()

        @override
        def check_fields(self) -> None:
            self.require("rope_dim", self.rope_dim % 2 == 0, "an even number, for pairs are rotated")
            width = self.nope_dim + self.rope_dim
            self.require(
                "value_dim", self.value_dim <= width, f"nope_dim + rope_dim={width} or less: a cache has one width"
            )

    # Without the projections from the latent of keys: those of cached tokens are made in groups of rows, or folded.
    projected = ("q_down_dr", "q_dkqh", "q_up_rkqh", "kv_down_dr", "out_kqhd")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        heads, width = cfg.num_heads, cfg.nope_dim + cfg.rope_dim
        check_heads_divide("LatentAttention: num_heads", heads)
        self.cache_shape = (heads, width)  # shape of keys and values; values are padded
        self.latent_width, self._absorbed = cfg.kv_rank + cfg.rope_dim, cfg.decode == "absorbed"
        self.window_shape = (1, self.latent_width) if self._absorbed else self.cache_shape
        if self._absorbed and math.prod(axis_sizes("heads").values()) > 1:
            raise UserError('LatentAttention.decode="absorbed" has one head of keys; expected a mesh without tensor')
        self.query_shape, self.value_dim = (heads, 1, width), cfg.value_dim
        self._nope_dim, self._kv_rank, self.sinks_kq = cfg.nope_dim, cfg.kv_rank, None
        into_heads = ("heads", None, None)

        def latent(rank: int, extra: int = 0) -> tuple[nnx.Param[jax.Array], RMSNorm]:
            weight = param(rngs, (cfg.dim, rank + extra), ("embed", None), fan_in_init(cfg.dim))
            return weight, cfg.norm.clone(dim=rank).build(rngs=rngs)

        if cfg.q_rank is None:
            self.q_down_dr, self.q_norm = None, None
            self.q_dkqh = param(rngs, (cfg.dim, heads, 1, width), ("embed", *into_heads), fan_in_init(cfg.dim))
            self.q_up_rkqh = None
        else:
            self.q_down_dr, self.q_norm = latent(cfg.q_rank)
            self.q_dkqh = None
            self.q_up_rkqh = param(rngs, (cfg.q_rank, heads, 1, width), (None, *into_heads), fan_in_init(cfg.q_rank))
        self.kv_down_dr, self.kv_norm = latent(cfg.kv_rank, cfg.rope_dim)
        up = fan_in_init(cfg.kv_rank)
        self.k_up_rkh = param(rngs, (cfg.kv_rank, heads, cfg.nope_dim), (None, "heads", None), up)
        self.v_up_rkh = param(rngs, (cfg.kv_rank, heads, cfg.value_dim), (None, "heads", None), up)
        out_init = fan_in_init(heads * cfg.value_dim)
        self.out_kqhd = param(rngs, (heads, 1, cfg.value_dim, cfg.dim), (*into_heads, "embed"), out_init)
        self.rope = cfg.rope.clone(head_dim=cfg.rope_dim).build(rngs=rngs)
        self.rules = ScoreRules(window=cfg.window, scale=cfg.scale)
        self.kernel, self.context_parallel = cfg.kernel.build(), cfg.context_parallel.build()

    def __call__(self, x_btd: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Return the output [b, t, d] and the layer's cache as updated by the context (None in training)."""
        rotate = self.rope.rotation(context.positions)
        gathered_btd = gather_length(x_btd)
        q = checkpoint_name(self._queries(gathered_btd, rotate), "query")
        latent, shared = self._latent(gathered_btd, rotate)
        attention = AttentionParams(self.rules, self.kernel, self.context_parallel)
        if isinstance(context, LatentContext) and context.holds_latents(cache):
            mixed, cache = self._attend_latents(q, jnp.concatenate([latent, shared], -1), context, cache, attention)
        else:
            k, v = self._keys_and_values(latent, shared)
            k, v = checkpoint_name(k, "key"), checkpoint_name(v, "value")
            v = v if cache is None else self._padded(v)
            mixed, cache = context.attend(q, k, v, cache, attention)
        mixed = mixed[..., : self.value_dim]
        out = project(mixed, self.out_kqhd[...], inputs=3, in_axis="heads", like=x_btd)
        return checkpoint_name(out, "attention_out"), cache

    def flops(self, work: Workload) -> float:
        """Return the FLOPs of the projections and of both products of attention."""
        return super().flops(work) + attention_flops(self.query_shape, self.value_dim, work.pairs(self.rules.window))

    def _queries(self, x_btd: jax.Array, rotate: Rotation) -> jax.Array:
        nope = self._nope_dim
        if self.q_down_dr is None or self.q_norm is None or self.q_up_rkqh is None:
            assert self.q_dkqh is not None
            q = project(x_btd, self.q_dkqh[...], out_axis="heads", out=self.query_shape)
        else:
            latent = self.q_norm(project(x_btd, self.q_down_dr[...]))
            q = project(latent, self.q_up_rkqh[...], out_axis="heads")
        return jnp.concatenate([q[..., :nope], rotate(q[..., nope:])], axis=-1)

    def _latent(self, x_btd: jax.Array, rotate: Rotation) -> tuple[jax.Array, jax.Array]:
        """Return the normalised latent [b, t, r], and the key that all heads share, with positions [b, t, rope_dim]."""
        down = project(x_btd, self.kv_down_dr[...])
        return self.kv_norm(down[..., : self._kv_rank]), rotate(down[:, :, None, self._kv_rank :])[:, :, 0]

    def _keys_and_values(self, latent: jax.Array, shared: jax.Array) -> tuple[jax.Array, jax.Array]:
        k = project(latent, self.k_up_rkh[...], out_axis="heads")
        v = project(latent, self.v_up_rkh[...], out_axis="heads")
        # A sum with zeros sharded as the heads are: a broadcast would be complete on every device.
        return jnp.concatenate([k, shared[:, :, None] + jnp.zeros_like(k[..., :1])], axis=-1), v

    def _padded(self, v: jax.Array) -> jax.Array:
        return jnp.pad(v, [(0, 0)] * 3 + [(0, self.cache_shape[1] - self.value_dim)])

    def expand(self, latent_btw: jax.Array, positions_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and padded values [b, t, k, h] of what is cached of tokens, positions included."""
        k, v = self._keys_and_values(latent_btw[..., : self._kv_rank], latent_btw[..., self._kv_rank :])
        return k, self._padded(v)

    def window_keys(self, latent_btw: jax.Array, positions_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values as windows of decoding hold them, [b, t, *window_shape]."""
        one = latent_btw[:, :, None]
        return (one, one) if self._absorbed else self.expand(latent_btw, positions_bt)

    def _attend_latents(
        self, q: jax.Array, latent_btw: jax.Array, context: LatentContext, cache: Any, attention: AttentionParams
    ) -> tuple[jax.Array, Any]:
        refuse_exact("attention to a cache of latents")
        if not (self._absorbed and context.decodes):
            return context.attend_latents(q, latent_btw, cache, attention, self.expand)
        nope, rope = q[:, :, :, 0, : self._nope_dim], q[:, :, :, 0, self._nope_dim :]
        folded = jnp.einsum("btkh,rkh->btkr", nope, self.k_up_rkh[...].astype(q.dtype))
        q_one = jnp.concatenate([folded, rope], axis=-1)[:, :, None]  # many queries of one head
        rules = dataclasses.replace(self.rules, scale=self.rules.scale_of(q.shape[-1]))
        attention = dataclasses.replace(attention, rules=rules)
        mixed, cache = context.attend_latents(q_one, latent_btw, cache, attention, self.window_keys)
        values = jnp.einsum("btkr,rkh->btkh", mixed[:, :, 0, :, : self._kv_rank], self.v_up_rkh[...].astype(q.dtype))
        return values[:, :, :, None], cache
