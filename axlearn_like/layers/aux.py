"""What layers return beside activations: losses and metrics of their own, and what a router chose.

Returned, never stored in a module: what is stored on the way through a scan is lost without a word.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aux:
    """The auxiliary outputs of one layer, or of a stack of them. A dense layer has none.

    Attributes:
        losses: float32 scalars, each already multiplied by its weight and a mean over the tokens seen, to be added to
            the loss.
        metrics: float32 scalars for people, means over the tokens seen; those named `*_max` are maxima.
        routing: int32 [batch, length, top_k], the experts chosen for each token; of a stack [layers, batch, length,
            top_k]. Given back to the same layers it makes them choose the same again.
    """

    losses: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    routing: Any = None


def reduce_layers(stacked: Aux) -> Aux:
    """One Aux for a whole stack: losses are added, metrics averaged (or maximised), routing stays by layer."""

    def one(name: str, values: jax.Array) -> jax.Array:
        return jnp.max(values, axis=0) if name.endswith("_max") else jnp.mean(values, axis=0)

    return Aux(
        losses={name: jnp.sum(values, axis=0) for name, values in stacked.losses.items()},
        metrics={name: one(name, values) for name, values in stacked.metrics.items()},
        routing=stacked.routing,
    )
