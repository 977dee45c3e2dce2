"""The layers of a decoder as they are stored: a few stacks, or one by one."""

from typing import Any, Self

import jax
import numpy as np
from flax import nnx

from axlearn_like.config import ConfigBase
from axlearn_like.layers.base import Layer, Params, Workload
from axlearn_like.layers.block_pattern import Segment, build_segments
from axlearn_like.layers.moe.routing import RoutingLayout
from mesh.errors import UserError


class BlockStack(Layer):
    """Blocks in segments (block_pattern.py), each a stack of its own; `unstack` makes a list of them.

    Attributes:
        segments: consecutive layers of one structure, in order; each names the attribute that is its stack.
        cache_shape: key/value heads of every layer and their width, in a cache.
        window_shape: the same in windows, which hold what a layer makes of its latents.
        latent_width: width of the latents that a cache holds in place of keys and values; None: it holds those.
    """

    def build_blocks(self, block: ConfigBase[Any], dim: int, keys: jax.Array) -> None:
        """Create the layers; one key for each."""
        made = build_segments(block, dim, keys)
        self.segments = tuple(segment for segment, _ in made)
        stacks: dict[str, Any] = {segment.name: stack for segment, stack in made}
        self.leading, self.layers, self.tail = (stacks.get(name) for name in ("leading", "layers", "tail"))
        self.num_layers = len(keys)
        self.cache_shape, self.window_shape, self.latent_width = self._cache_shapes()

    def layers_flops(self, work: Workload) -> float:
        """Return the FLOPs of all layers."""
        if isinstance(self.layers, tuple):
            return sum(block.flops(work) for block in self.layers)
        kinds = ((jax.tree.map(lambda leaf: leaf[0], block), count) for block, count in self.kinds())
        return sum(count * block.flops(work) for block, count in kinds)

    def kinds(self) -> list[tuple[Any, int]]:
        """Return each kind of block, with the parameters of its segment's stack, and how many layers are of it."""
        return [
            (segment.block(getattr(self, segment.name), kind), segment.count // segment.period)
            for segment in self.segments
            for kind in range(segment.period)
        ]

    def blocks(self) -> list[Any]:
        """Return the layers one by one, in order."""
        if isinstance(self.layers, tuple):
            return list(self.layers)
        stacks = ((segment, getattr(self, segment.name)) for segment in self.segments)
        return [
            segment.block(jax.tree.map(lambda leaf, i=index: leaf[i], stack), index)
            for segment, stack in stacks
            for index in range(segment.count)
        ]

    def _mixtures(self) -> dict[int, Any]:
        """Return the mixtures of experts, maybe wrapped, by layer; with the parameters of its stack."""
        if isinstance(self.layers, tuple):
            blocks = list(self.layers)
        else:
            blocks = [getattr(self, segment.name) for segment in self.segments for _ in range(segment.count)]
        feeds: list[Any] = [getattr(block, "feed_forward", None) for block in blocks]
        return {index: feed for index, feed in enumerate(feeds) if hasattr(feed, "num_experts")}

    @property
    def has_experts(self) -> bool:
        """True if a layer is a mixture of experts."""
        return bool(self._mixtures())

    @property
    def routing_layout(self) -> RoutingLayout | None:
        """The parts of a record of its routing; None: it has no experts, or of several kinds and no record."""
        found = self._mixtures()
        if not found:
            return None
        kinds = {(feed.num_experts, feed.router.top_k, feed.record_routing) for feed in found.values()}
        if len(kinds) > 1:
            if not any(feed.record_routing for feed in found.values()):
                return None
            raise UserError(
                f"Decoder: layers with mixtures of {len(kinds)} kinds; expected the same num_experts, top_k and "
                "record_routing in all"
            )
        return RoutingLayout(tuple(found), self.num_layers, *kinds.pop())

    def unstack(self) -> Self:
        """Return the model with its layers in a list: XLA's CPU backend copies each weight it slices from a stack."""
        self.layers = nnx.data(tuple(self.blocks()))
        self.leading = self.tail = None
        self.segments = (Segment("layers", 0, self.num_layers),)
        return self

    def unstack_params(self, params: Params) -> Params:
        """Return parameters of this model, or of one with the same segments, as those of the unstacked one."""
        rest = {name: value for name, value in params.items() if name not in {one.name for one in self.segments}}
        layers = {
            segment.first + i: jax.tree.map(lambda leaf, i=i: _entry(leaf, i), params[segment.name])
            for segment in self.segments
            for i in range(segment.count)
        }
        return {**rest, "layers": layers}

    def _cache_shapes(self) -> tuple[tuple[int, int], tuple[int, int], int | None]:
        """Return key/value heads and their width in a cache and in windows, and the width of latents (None: none).

        They are those of all layers; where only some have latents, all cache keys and values.
        """
        stacks = [getattr(self, segment.name) for segment in self.segments]
        shapes = {stack.cache_shape for stack in stacks}
        latents = {getattr(stack, "latent_width", None) for stack in stacks}
        if len(shapes) > 1:
            raise UserError(
                f"Decoder: layers have caches of different shapes {sorted(shapes)}; expected the same number of "
                "key/value heads of the same width in all"
            )
        shape, latent = shapes.pop(), latents.pop() if len(latents) == 1 else None
        return shape, stacks[0].window_shape if latent else shape, latent


def _entry(stack: Any, index: int) -> Any:
    """Return an entry of a stack: one program for all indices of an array, where `stack[index]` is one for each."""
    return _entry_of_array(stack, np.int32(index)) if isinstance(stack, jax.Array) else stack[index]


@jax.jit
def _entry_of_array(stack: jax.Array, index: np.int32) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
