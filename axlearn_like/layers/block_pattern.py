"""Stacks of blocks: how a decoder stores its layers, alike or in a pattern that repeats, with others before it.

A decoder stores its layers as a few *segments*: consecutive layers with one structure of parameters, stacked on the
first axis and scanned. Kinds of blocks that repeat within a segment share that stack, so they may differ in what is
static alone (window, rotary base, soft cap); the scan then takes one period of them at a time. A segment's name is
that of its parameters: `layers`, and before it `leading`, behind it `tail`, the rest of a pattern that does not fit.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, override

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from axlearn_like.config import REQUIRED, ConfigBase, ConfigError, Configurable, path_of
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import Layer, Params, Workload, bind, build_abstract, draw_stack, split
from axlearn_like.layers.moe.routing import RoutingLayout
from axlearn_like.layers.pipeline import AXIS, shard_layers
from axlearn_like.remat import Remat, checkpoint
from mesh.devices import platform
from mesh.errors import UserError
from mesh.programs.shared import traced_once, unknown_indices
from mesh.rules import axis_sizes
from mesh.sharding import full_spec


class BlockPattern(Configurable):
    """Blocks of several kinds, in the place of one: `blocks` in turn, again and again, after the leading ones.

    The blocks of the pattern have one structure of parameters; the leading ones may have another (DeepSeek's first
    blocks are dense, the others mixtures of experts).
    """

    class Config(ConfigBase["BlockPattern"]):
        dim: int = REQUIRED
        blocks: tuple[ConfigBase, ...] = REQUIRED
        leading: ConfigBase | None = None
        num_leading: int = 0

        @override
        def check_fields(self) -> None:
            self.require("blocks", len(self.blocks) > 0, "one block or more")
            self.require_least(0, "num_leading")
            wanted = "a block for num_leading layers, or None and num_leading 0"
            self.require("leading", (self.leading is None) == (self.num_leading == 0), wanted)


class Segment(NamedTuple):
    """Consecutive layers with one structure of parameters. Static."""

    name: str  # name of their stack, an attribute of the decoder
    first: int  # index of the first layer
    count: int  # number of layers
    # Graph definitions of the blocks, in turn; empty: all are alike, as the stack is
    kinds: tuple[nnx.GraphDef[Any], ...] = ()

    @property
    def period(self) -> int:
        """Layers after which the kinds repeat."""
        return max(1, len(self.kinds))

    def block(self, layer: Any, index: int) -> Any:
        """Return a layer of the stack as the kind that stands at this index of the segment."""
        return bind(self.kinds[index % self.period], split(layer)[1]) if self.kinds else layer


def first_block(block: ConfigBase[Any]) -> ConfigBase[Any]:
    """Return the config of a block: the first of a pattern's repeated ones."""
    return block.blocks[0] if isinstance(block, BlockPattern.Config) else block


def segment_layers(block: ConfigBase[Any], num_layers: int) -> dict[str, range]:
    """Return the layers of each segment of a decoder, in order, by its name."""
    found: dict[str, range] = {}
    first = 0
    for name, _, count in _planned(block, num_layers):
        found[name] = range(first, first + count)
        first += count
    return found


def layer_blocks(block: ConfigBase[Any], num_layers: int) -> list[ConfigBase[Any]]:
    """Return the config of each layer's block."""
    planned = _planned(block, num_layers)
    return [blocks[index % len(blocks)] for _, blocks, count in planned for index in range(count)]


def build_segments(block: ConfigBase[Any], dim: int, keys: jax.Array) -> list[tuple[Segment, Any]]:
    """Return the segments of a decoder, in order, each with its new stack of blocks; one key for each layer.

    Raises:
        UserError: the mesh has a pipeline, and there are several segments.
        ConfigError: blocks of the pattern have different parameters, or there are fewer layers than leading ones.
    """
    made: list[tuple[Segment, Any]] = []
    first, planned = 0, _planned(block.clone(dim=dim), len(keys))
    if len(planned) > 1 and axis_sizes("layers").get(AXIS, 1) > 1:
        parts = ", ".join(f"{name} ({count})" for name, _, count in planned)
        raise UserError(f"Decoder: the layers {parts} are stacks of their own; expected a mesh without a pipeline axis")
    for name, blocks, count in planned:
        kinds = [one.clone(dim=dim) for one in blocks]
        part = keys[first : first + count] if count < len(keys) else keys
        stack = draw_stack(lambda key, kind=kinds[0]: kind.build(rngs=nnx.Rngs(key)), part)
        graphdefs = _graphdefs(kinds, path_of(block)) if len(kinds) > 1 else ()
        made.append((Segment(name, first, count, graphdefs), shard_layers(stack, count)))
        first += count
    return made


def _planned(block: ConfigBase[Any], layers: int) -> list[tuple[str, Sequence[ConfigBase[Any]], int]]:
    """Return (name, kinds, number of layers) of each segment."""
    if not isinstance(block, BlockPattern.Config):
        return [("layers", [block], layers)]
    block.check_fields()
    rest, period = layers - block.num_leading, len(block.blocks)
    block.require("num_leading", rest > 0, f"less than the decoder's num_layers={layers}")
    whole = rest // period * period
    parts = [] if block.leading is None else [("leading", (block.leading,), block.num_leading)]
    if not whole:
        return [*parts, ("layers", block.blocks[:rest], rest)]
    tail = [("tail", block.blocks[: rest - whole], rest - whole)] if rest > whole else []
    return [*parts, ("layers", block.blocks, whole), *tail]


def _graphdefs(kinds: Sequence[ConfigBase[Any]], path: str) -> tuple[nnx.GraphDef[Any], ...]:
    built = [split(build_abstract(kind)) for kind in kinds]
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) for _, params in built]
    for index, one in enumerate(shapes):
        if one != shapes[0]:
            raise ConfigError(
                f"{path}.blocks.{index}: expected the parameters of blocks.0, of one stack with it; "
                "blocks with others may be `leading`",
                f"{path}.blocks.{index}",
            )
    return tuple(graphdef for graphdef, _ in built)


Apply = Callable[[Any, Any], tuple[Any, Aux]]  # (carry, (layer, its index, its routing)) -> (carry, aux)


def scan_segment(
    applies: Sequence[Apply], carry: Any, layers: Any, *, unroll: int = 1, remat: Remat | None = None
) -> tuple[Any, Aux]:
    """Return the carry after all layers of a segment, and their aux stacked by layer.

    Args:
        applies: one for each kind, in turn.
        layers: pytree of arrays [layers, ...].
        unroll: layers of a step of the scan, if there is one kind; else a multiple of their number.
        remat: what a layer stores for the backward pass; None: everything.
    """
    period = len(applies)
    if period == 1:
        apply, count = checkpoint(applies[0], remat), jax.tree.leaves(layers)[0].shape[0]
        if 1 < count <= unroll and platform() == "cpu":
            return _one_by_one(apply, carry, layers, count)
        return jax.lax.scan(apply, carry, layers, unroll=unroll)

    def of_group(apply: Apply, index: int) -> Apply:
        # Checkpointed with the whole group: what a layer is given is stored, so its slice would be a copy of the stack.
        return checkpoint(lambda carry, several: apply(carry, jax.tree.map(lambda leaf: leaf[index], several)), remat)

    own = [of_group(apply, index) for index, apply in enumerate(applies)]

    def group(carry: Any, several: Any) -> tuple[Any, Aux]:
        found = []
        for apply in own:
            carry, aux = apply(carry, several)
            found.append(aux)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    groups = jax.tree.map(lambda leaf: _reshaped(leaf, 1, (leaf.shape[0] // period, period)), layers)
    carry, aux = jax.lax.scan(group, carry, groups, unroll=max(1, unroll // period))
    return carry, jax.tree.map(lambda leaf: _reshaped(leaf, 2, (leaf.shape[0] * period,)), aux)


def _one_by_one(apply: Apply, carry: Any, layers: Any, count: int) -> tuple[Any, Aux]:
    """Return what a scan over all layers at once does, for CPUs: what differs by layer is unknown to the compiler.

    A scan would slice at constants, and XLA compile a kernel for each layer.
    """
    leaves, treedef = jax.tree.flatten(layers)
    indices = unknown_indices(count)
    entries = [_unstacked(leaf, indices) if jnp.issubdtype(leaf.dtype, jnp.floating) else _read(leaf, indices)
               for leaf in leaves]  # fmt: skip
    run, found = traced_once(apply), list[Aux]()
    for index in range(count):
        carry, aux = run(carry, treedef.unflatten([each[index] for each in entries]))
        found.append(aux)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *found)


def _read(stack: jax.Array, indices: list[jax.Array]) -> list[jax.Array]:
    return [jax.lax.dynamic_index_in_dim(stack, index, keepdims=False) for index in indices]


# The gradient of a stack is that of its entries side by side; by default zeros, to which each of them is added.
_unstacked: Any = jax.custom_vjp(_read)
_unstacked.defvjp(
    lambda stack, indices: (_read(stack, indices), len(indices)), lambda count, x: (jnp.stack(x), [None] * count)
)


def _reshaped(x: jax.Array, axes: int, new: tuple[int, ...]) -> jax.Array:
    """Return x with its first axes, which are not sharded, in another shape."""
    spec = full_spec(x)
    sharding = None if spec is None else PartitionSpec(*[None] * len(new), *spec[axes:])
    return jnp.reshape(x, (*new, *x.shape[axes:]), out_sharding=sharding)


class BlockStack(Layer):
    """Blocks in segments, each a stack of its own; `unstack` makes a list of them.

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
