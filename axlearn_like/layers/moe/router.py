"""Routers: the experts of each token, and their weights. All in float32.

Losses keep a router from sending all tokens to the same experts. Their means and those of metrics are over every token
of the batch (or microbatch) on all devices that is not padding: `live`, bool [batch, length]; None: none is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.kernels.deterministic import each, exponentials, no_fuse, row_sum
from axlearn_like.layers.base import Layer, fan_in_init, param
from axlearn_like.layers.linear import project
from axlearn_like.layers.moe.load_balance import (
    balance_bias,
    load_balance_loss,
    router_metrics,
    sequence_balance_loss,
    z_loss,
)
from axlearn_like.layers.moe.routing import live_tokens
from axlearn_like.remat import checkpoint_name


class Routed(NamedTuple):
    """A router's choice."""

    experts: jax.Array  # int32 [batch, length, top_k], no expert twice for a token
    weights: jax.Array  # float32 [batch, length, top_k]
    losses: dict[str, jax.Array]  # float32 scalars, weighted
    metrics: dict[str, jax.Array]  # float32 scalars


class SoftmaxRouter(Layer):
    """The top_k of softmax(x W) (Shazeer et al. 2017, arXiv 1701.06538, without noise): Mixtral, Qwen3."""

    fixed_order = True
    unrounded = ("weight_de",)  # a choice of experts depends on last bits, and those of rollouts are trained

    class Config(ConfigBase["SoftmaxRouter"]):
        dim: int = REQUIRED
        num_experts: int = REQUIRED
        top_k: int = REQUIRED
        renormalise: bool = True  # a token's weights sum to 1 (Qwen3's `norm_topk_prob`)
        load_balance: float = 0.001  # weight of that loss
        z_loss: float = 0.0

        @override
        def check_fields(self) -> None:
            self.require("top_k", 1 <= self.top_k <= self.num_experts, f"1 to num_experts={self.num_experts}")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.weight_de = param(rngs, (cfg.dim, cfg.num_experts), ("embed", None), fan_in_init(cfg.dim))
        self.top_k, self.renormalise = cfg.top_k, cfg.renormalise
        self.loss_weights = (("load_balance", cfg.load_balance), ("router_z", cfg.z_loss))

    def __call__(self, x_btd: jax.Array, routing: Any = None) -> Routed:
        """Return the routing of [b, t, d]; `routing`: see `MoE.__call__`. Padding counts in no mean."""
        logits = self._logits(x_btd)
        weights, total = exponentials(logits)
        probs = no_fuse(weights / total)
        experts, live = _replayed(_top(probs, self.top_k), routing), live_tokens(routing)
        chosen = _pick(probs, experts)
        if self.renormalise:
            chosen = chosen / row_sum(chosen)
        losses = {
            "load_balance": lambda: load_balance_loss(probs, experts, live),
            "router_z": lambda: z_loss(logits, live),
        }
        metrics = router_metrics(probs, experts, live)
        return Routed(experts, chosen, _weighted(losses, self.loss_weights), metrics)

    def _logits(self, x_btd: jax.Array) -> jax.Array:
        return _logits(x_btd, self.weight_de[...])


class BiasedSoftmaxRouter(SoftmaxRouter):
    """The top_k of x W + b, with the softmax over the chosen: gpt-oss (that of all, renormalised, is the same)."""

    unrounded = ("weight_de", "bias_e")

    def __init__(self, cfg: SoftmaxRouter.Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.bias_e = param(rngs, (cfg.num_experts,), (None,), jax.nn.initializers.zeros)

    def _logits(self, x_btd: jax.Array) -> jax.Array:
        return no_fuse(super()._logits(x_btd) + self.bias_e[...].astype(jnp.float32))


class SigmoidRouter(Layer):
    """The top_k of sigmoid(x W) + bias, weighted without the bias: DeepSeek-V3 (arXiv 2412.19437, 2.1.2).

    The bias balances the load and has no gradient of any loss: after each update of the other parameters it is
    increased by a fixed step for experts with less than the mean load, and decreased for the others
    (`learner.expert_bias`).
    """

    fixed_order = True
    unrounded = ("weight_de", "balance_bias_e")

    class Config(ConfigBase["SigmoidRouter"]):
        dim: int = REQUIRED
        num_experts: int = REQUIRED
        top_k: int = REQUIRED
        renormalise: bool = True  # a token's weights sum to `scale`
        scale: float = 1.0  # factor of the weights
        groups: int = 1  # number of groups of neighbouring experts
        groups_kept: int = 1  # groups that a token may use: those with the highest sum of their best two scores
        sequence_balance: float = 0.0001  # weight of that loss
        z_loss: float = 0.0

        @override
        def check_fields(self) -> None:
            divides = self.groups >= 1 and self.num_experts % self.groups == 0
            self.require("groups", divides, f"a divisor of num_experts={self.num_experts}")
            self.require("groups_kept", 1 <= self.groups_kept <= self.groups, f"1 to groups={self.groups}")
            size = self.num_experts // self.groups
            self.require("groups", self.groups == 1 or size >= 2, "groups of 2 experts or more")
            most = self.groups_kept * size
            self.require("top_k", 1 <= self.top_k <= most, f"1 to the {most} experts of groups_kept groups")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.weight_de = param(rngs, (cfg.dim, cfg.num_experts), ("embed", None), fan_in_init(cfg.dim))
        self.balance_bias_e = param(rngs, (cfg.num_experts,), (None,), jax.nn.initializers.zeros)
        self.top_k, self.renormalise, self.scale = cfg.top_k, cfg.renormalise, cfg.scale
        self.groups, self.groups_kept = cfg.groups, cfg.groups_kept
        self.loss_weights = (("sequence_balance", cfg.sequence_balance), ("router_z", cfg.z_loss))

    def __call__(self, x_btd: jax.Array, routing: Any = None) -> Routed:
        """Return the routing, see `SoftmaxRouter.__call__`."""
        logits, bias = _logits(x_btd, self.weight_de[...]), self.balance_bias_e[...]
        scores = each(jax.nn.sigmoid, logits)
        experts, live = _replayed(_top(self._seen(scores + bias), self.top_k), routing), live_tokens(routing)
        chosen = _pick(scores, experts)
        if self.renormalise:
            chosen = chosen / (row_sum(chosen) + 1e-20)
        probs = scores / (row_sum(scores) + 1e-20)
        losses = {
            "sequence_balance": lambda: sequence_balance_loss(probs, experts, live),
            "router_z": lambda: z_loss(logits, live),
        }
        weighted = {
            **_weighted(losses, self.loss_weights),
            "balance_bias": balance_bias(bias, experts, live),
        }
        metrics = router_metrics(probs, experts, live)
        return Routed(experts, chosen * self.scale, weighted, metrics)

    def _seen(self, choice: jax.Array) -> jax.Array:
        """Return scores with -inf for experts outside the token's groups; a group scores the sum of its two best."""
        if self.groups == self.groups_kept:
            return choice
        choice = jax.lax.stop_gradient(choice)
        split = jnp.split(choice, self.groups, axis=-1)
        best = jnp.stack([jnp.sum(jax.lax.top_k(group, 2)[0], axis=-1) for group in split], axis=-1)
        kept = jax.lax.top_k(best, self.groups_kept)[1]
        seen = [jnp.any(kept == index, axis=-1, keepdims=True) for index in range(self.groups)]
        parts = zip(split, seen, strict=True)
        return jnp.concatenate([jnp.where(keep, group, -jnp.inf) for group, keep in parts], axis=-1)


def _logits(x_btd: jax.Array, weight_de: jax.Array) -> jax.Array:
    # By default TPUs multiply float32 in one pass of bfloat16; a choice must not depend on that.
    with jax.default_matmul_precision("float32"):
        return no_fuse(project(x_btd.astype(jnp.float32), weight_de))


def _top(scores: jax.Array, top_k: int) -> jax.Array:
    """Return the experts with the highest scores, int32; of equals, the first."""
    return checkpoint_name(jax.lax.top_k(jax.lax.stop_gradient(scores), top_k)[1], "routing")


def _replayed(chosen: jax.Array, routing: Any) -> jax.Array:
    return chosen if routing is None else jnp.where(routing >= 0, routing, chosen).astype(jnp.int32)


def _pick(scores: jax.Array, experts: jax.Array) -> jax.Array:
    """Return scores[..., experts] by comparison and a sum with zeros: exact, and no scatter in the gradient."""
    is_chosen = experts[..., None] == jnp.arange(scores.shape[-1], dtype=experts.dtype)
    return jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0.0), axis=-1)


def _weighted(
    losses: dict[str, Callable[[], jax.Array]], weights: tuple[tuple[str, float], ...]
) -> dict[str, jax.Array]:
    """Return losses times their weights, without those of weight 0."""
    return {name: weight * losses[name]() for name, weight in weights if weight}
