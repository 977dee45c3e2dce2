"""Auxiliary outputs of layers beside activations: losses and metrics of their own, and the experts a router chose.

Returned, never stored in a module: values stored on the way through a scan are lost silently.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aux:
    """The auxiliary outputs of one layer, or of a stack of layers. A dense layer has none.

    Attributes:
        losses: float32 scalars, each already multiplied by its weight and a mean over the tokens seen, to be added to
            the loss.
        metrics: float32 scalars to be logged, means over the tokens seen; those named `*_max` are maxima.
        routing: int32 [batch, length, top_k], the experts chosen for each token; for a stack [layers, batch, length,
            top_k]. Passed to the same layers again, it makes them use the same experts.
    """

    losses: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    routing: Any = None


def reduce_layers(stacked: Aux) -> Aux:
    """Return one Aux for a whole stack: losses are added, metrics averaged (or maximised), routing kept by layer."""

    def one(name: str, values: jax.Array) -> jax.Array:
        return jnp.max(values, axis=0) if name.endswith("_max") else jnp.mean(values, axis=0)

    return Aux(
        losses={name: jnp.sum(values, axis=0) for name, values in stacked.losses.items()},
        metrics={name: one(name, values) for name, values in stacked.metrics.items()},
        routing=stacked.routing,
    )
