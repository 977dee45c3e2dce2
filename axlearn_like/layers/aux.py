"""Auxiliary outputs of layers beside activations: losses and metrics of their own, and the experts a router chose.

Returned, never stored in a module: values stored on the way through a scan are lost silently.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aux:
    """The auxiliary outputs of one layer, or of a stack of layers. A dense layer has none."""

    # float32 scalars, each already multiplied by its weight and a mean over the tokens seen, to be added to the loss
    losses: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    # float32 scalars to be logged, means over the tokens seen; those named `*_max` are maxima. Those named `*_by_layer`
    # are arrays, of a stack [layers that have it, ...], for the trainer and not logged.
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    # int32 [batch, length, top_k], the experts chosen for each token; for a stack [layers, batch, length, top_k], -1
    # for layers without experts. Passed to the same layers again, it makes them use the same experts.
    routing: Any = None


def concat_layers(parts: Sequence[Aux], counts: Sequence[int]) -> Aux:
    """Return one stacked Aux of consecutive stacks of so many layers each: what only some have counts for those."""
    if len(parts) == 1:
        return parts[0]

    def joined(of_parts: Sequence[dict[str, jax.Array]]) -> dict[str, jax.Array]:
        names = dict.fromkeys(name for values in of_parts for name in values)
        return {name: jnp.concatenate([values[name] for values in of_parts if name in values]) for name in names}

    known = [part.routing for part in parts if part.routing is not None]
    routing = None
    if known:
        one = jnp.full_like(known[0][:1], -1)
        filled = (
            jnp.concatenate([one] * count) if part.routing is None else part.routing
            for part, count in zip(parts, counts, strict=True)
        )
        routing = jnp.concatenate(list(filled))
    return Aux(joined([part.losses for part in parts]), joined([part.metrics for part in parts]), routing)


def only_routing(layers: Sequence[Aux]) -> Aux:
    """Return the routing of single layers, stacked; their losses and metrics are not wanted."""
    return concat_layers(
        [Aux(routing=None if a.routing is None else a.routing[None]) for a in layers], [1] * len(layers)
    )


def reduce_layers(stacked: Aux) -> Aux:
    """Return one Aux for a whole stack: losses are added, metrics averaged (or maximised), what is by layer kept."""

    def one(name: str, values: jax.Array) -> jax.Array:
        if name.endswith("_by_layer"):
            return values
        return jnp.max(values, axis=0) if name.endswith("_max") else jnp.mean(values, axis=0)

    return Aux(
        losses={name: jnp.sum(values, axis=0) for name, values in stacked.losses.items()},
        metrics={name: one(name, values) for name, values in stacked.metrics.items()},
        routing=stacked.routing,
    )
