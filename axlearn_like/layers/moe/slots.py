"""Experts in slots, as rollout engines hold them: a popular expert in several, on several devices.

All devices have all rows there. Each takes the rows of its slots, and results of rows are added up over devices before
the weighted sum of a token's experts: a row is computed on one device and zeros are added to it, so results have the
bits of a single device, wherever experts are.
"""

from typing import override

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.config import REQUIRED
from axlearn_like.layers.base import param
from axlearn_like.layers.moe.dispatch import combine, counts, order_by, repeat_sorted
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.replicas import Placement, rows_by_slot
from axlearn_like.layers.moe.weights import ExpertWeights


class SlottedExperts(Experts):
    """`Experts` whose weights are those of slots: matrices [slots, ...], with the table that fills them."""

    unrounded = ("experts_s", "ends_s")

    class Config(Experts.Config):
        slots: int = REQUIRED  # slots of all devices together

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg.clone(num_experts=cfg.slots), rngs=rngs)
        self._num_experts, zeros = cfg.num_experts, jax.nn.initializers.zeros
        self.experts_s = param(rngs, (cfg.slots,), (None,), zeros, jnp.int32)
        self.ends_s = param(rngs, (cfg.slots,), (None,), zeros, jnp.int32)

    @override
    def _placement(self) -> Placement:
        return Placement(self.experts_s[...], self.ends_s[...])

    @override
    def _brought(self, shards: ExpertWeights, placement: Placement) -> ExpertWeights:
        return shards

    @override
    def _local(
        self,
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        matrices: ExpertWeights,
        *,
        shared: bool = False,
        placement: Placement | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        assert placement is not None and shared, "experts in slots are an engine's, on several devices"
        (batch, length, dim), top_k = x.shape, experts.shape[-1]
        slots = choose_slots(experts.reshape(-1), self._num_experts, placement)
        order, sizes = order_by(slots), counts(slots, len(placement.experts))
        rows = repeat_sorted(x.reshape(-1, dim), order)
        y = self._own_experts(rows, sizes, matrices, jax.lax.axis_size("expert"))
        y = combine(jax.lax.psum(y, "expert"), order, weights.reshape(-1, top_k))
        y = jnp.where(jax.lax.axis_index("expert") == 0, y, 0)  # all have it, and the caller adds devices up
        return y.reshape(batch, length, dim), jnp.ones(())


def choose_slots(chosen: jax.Array, num_experts: int, placement: Placement) -> jax.Array:
    """Return int32 [rows], the slot of each row of int32 [rows] experts; as many as there are slots: of no expert.

    Rows of an expert, in their order, go to its slots in consecutive parts, as large as their shares say.
    """
    order, sizes = order_by(chosen), counts(chosen, num_experts)
    each, starts = rows_by_slot(sizes[None], placement)
    by_expert = jnp.argsort(placement.experts, stable=True)
    ends = (starts + each)[0][by_expert]
    found = jnp.searchsorted(ends, jnp.arange(len(chosen)), side="right")
    slots = jnp.append(by_expert, len(by_expert))[found].astype(jnp.int32)
    return slots[order.target]


def slotted(experts: Experts.Config, slots: int) -> SlottedExperts.Config:
    """Return the config of experts in so many slots. UserError: they have biases, or no such form."""
    fits = type(experts) is Experts.Config
    experts.require("num_experts", fits, "plain Experts, where an engine has replicas of them")
    return SlottedExperts.Config().filled_from(experts, slots=slots)
