"""Routing as an array: the experts that tokens are to use, where that is not left to the router.

int32 [batch, length, top_k], or [batch, length, 1] where no expert is prescribed. A record of it is compact: the layers
that have experts only, in the smallest type.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.layers.contexts.packed import Context
from mesh.sharding import shard_like

CHOOSE = -1  # the router chooses
PADDING = -2  # a token that is no one's: it goes to no expert and counts nowhere


def mark_padding(routing: Any, context: Context, x_btd: jax.Array) -> Any:
    """Return the routing with PADDING at the tokens that the context knows to be padding, sharded as tokens x are."""
    live = context.live
    if live is None:
        return routing
    live = shard_like(live, x_btd)[..., None]
    return jnp.where(live, CHOOSE if routing is None else routing, PADDING).astype(jnp.int32)


def live_tokens(routing: Any) -> jax.Array | None:
    """Return bool [batch, length], False at padding; None: no token is."""
    return None if routing is None else routing[..., 0] != PADDING


class RoutingLayout(NamedTuple):
    """The parts of a record of a model's routing. Static."""

    layers: tuple[int, ...]  # indices of those with experts
    num_layers: int  # number of layers of the model
    num_experts: int  # number of experts of a layer
    top_k: int  # experts of a token
    recorded: bool  # the layers return their choice

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds the number of every expert."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def shape(self) -> tuple[int, int]:
        """The record of one token: layers with experts, experts of a token."""
        return len(self.layers), self.top_k

    def compact(self, routing: jax.Array) -> jax.Array:
        """Return the record [layers with experts, ...] of int32 [layers, ...]; padding has no defined one."""
        if len(self.layers) < self.num_layers:
            routing = jnp.stack([routing[layer] for layer in self.layers])
        return routing.astype(self.dtype)

    def expand(self, record: jax.Array) -> jax.Array:
        """Return int32 [layers, ...], as `Decoder.hidden` takes it, of integers [layers with experts, ...]."""
        record = record.astype(jnp.int32)
        if len(self.layers) == self.num_layers:
            return record
        none, places = jnp.full_like(record[0], CHOOSE), {layer: at for at, layer in enumerate(self.layers)}
        return jnp.stack([record[places[layer]] if layer in places else none for layer in range(self.num_layers)])
