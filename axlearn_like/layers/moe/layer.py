"""Mixture of experts: a feed-forward layer in which each token uses a few of many networks."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import Layer
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.load_balance import expert_load
from axlearn_like.layers.moe.replicas import current_placement
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.moe.routing import PADDING, live_tokens


class MoE(Layer):
    """The weighted sum of a token's experts, plus a shared network that all tokens use, if there is one.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from axlearn_like.layers.moe.experts import Experts
    >>> from axlearn_like.layers.moe.layer import MoE
    >>> from axlearn_like.layers.moe.router import SoftmaxRouter
    >>> cfg = MoE.Config(dim=16, num_experts=4, router=SoftmaxRouter.Config(top_k=2), experts=Experts.Config(hidden=32))
    >>> result, aux = cfg.build(rngs=nnx.Rngs(0))(jnp.ones((1, 3, 16)))
    >>> result.shape
    (1, 3, 16)
    """

    fixed_order = True

    class Config(ConfigBase["MoE"]):
        dim: int = REQUIRED
        num_experts: int = REQUIRED
        router: ConfigBase = SoftmaxRouter.Config()
        experts: Experts.Config = Experts.Config()
        shared: ConfigBase | None = None  # shared expert, e.g. SwiGLU.Config; None: none
        record_routing: bool = False  # return the chosen experts: 4 * top_k bytes per token and layer
        route_padding: bool = False  # padding has experts too, and counts in losses and metrics of the balance

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        sizes = {"dim": cfg.dim, "num_experts": cfg.num_experts}
        self.router = cfg.router.clone(**sizes).build(rngs=rngs)
        self.experts = cfg.experts.clone(**sizes).build(rngs=rngs)
        self.shared = None if cfg.shared is None else cfg.shared.clone(dim=cfg.dim).build(rngs=rngs)
        self.record_routing, self.route_padding = cfg.record_routing, cfg.route_padding
        self.num_experts = cfg.num_experts

    def used_share(self, path: str) -> float:
        """Return the share of the experts that a token goes through, and 1 for router and shared network."""
        return self.router.top_k / self.num_experts if path == "experts" else 1.0

    def __call__(self, x_btd: jax.Array, routing: Any = None) -> tuple[jax.Array, Aux]:
        """Return [b, t, d] for [b, t, d].

        Args:
            routing: int32 [b, t, top_k], experts to use instead of the router's choice, each with the weight that the
                router gives it now; -1: the router chooses; -2: padding, which has no expert. None: it chooses all.
        """
        routed = self.router(x_btd, routing)
        experts, live = routed.experts, live_tokens(routing)
        if live is not None:
            experts = jnp.where(live[..., None], experts, self.num_experts)  # sorted behind all rows of experts
        y_btd, rounds = self.experts(x_btd, experts, routed.weights)
        if self.shared is not None:
            y_btd = y_btd + self.shared(x_btd)[0]
        metrics = {**routed.metrics, "expert_rounds_max": rounds}
        if current_placement() is not None:
            metrics["expert_load_by_layer"] = expert_load(routed.experts, self.num_experts, live)
        if not self.record_routing:
            return y_btd, Aux(routed.losses, metrics)
        record = routed.experts if live is None else jnp.where(live[..., None], routed.experts, PADDING)
        return y_btd, Aux(routed.losses, metrics, record)
