"""Stacks whose blocks are not all alike: a pattern that repeats, and others before it.

A decoder stores its layers as a few *segments*: consecutive layers with one structure of parameters, stacked on the
first axis and scanned. Kinds of blocks that repeat within a segment share that stack, so they may differ in what is
static alone (window, rotary base, soft cap); the scan then takes one period of them at a time. A segment's name is
that of its parameters: `layers`, and before it `leading`, behind it `tail`, the rest of a pattern that does not fit.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from axlearn_like.config import REQUIRED, ConfigBase, ConfigError, Configurable, path_of
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.pipeline import AXIS, shard_layers
from mesh.errors import UserError
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
    """Consecutive layers with one structure of parameters. Static.

    Attributes:
        name: name of their stack, an attribute of the decoder.
        first: index of the first layer.
        count: number of layers.
        kinds: graph definitions of the blocks, in turn; empty: all are alike, as the stack is.
    """

    name: str
    first: int
    count: int
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
        stack = jax.vmap(lambda key, kind=kinds[0]: kind.build(rngs=nnx.Rngs(key)))(part)
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


def scan_segment(applies: Sequence[Apply], carry: Any, layers: Any, *, unroll: int = 1) -> tuple[Any, Aux]:
    """Return the carry after all layers of a segment, and their aux stacked by layer.

    Args:
        applies: one for each kind, in turn.
        carry: carry of the scan.
        layers: pytree of arrays [layers, ...].
        unroll: layers per iteration.
    """
    period = len(applies)
    if period == 1:
        return jax.lax.scan(applies[0], carry, layers, unroll=unroll)

    def group(carry: Any, several: Any) -> tuple[Any, Aux]:
        found = []
        for index, apply in enumerate(applies):
            carry, aux = apply(carry, jax.tree.map(lambda leaf, i=index: leaf[i], several))
            found.append(aux)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    groups = jax.tree.map(lambda leaf: _reshaped(leaf, 1, (leaf.shape[0] // period, period)), layers)
    carry, aux = jax.lax.scan(group, carry, groups, unroll=max(1, unroll // period))
    return carry, jax.tree.map(lambda leaf: _reshaped(leaf, 2, (leaf.shape[0] * period,)), aux)


def _reshaped(x: jax.Array, axes: int, new: tuple[int, ...]) -> jax.Array:
    """Return x with its first axes, which are not sharded, in another shape."""
    spec = full_spec(x)
    sharding = None if spec is None else PartitionSpec(*[None] * len(new), *spec[axes:])
    return jnp.reshape(x, (*new, *x.shape[axes:]), out_sharding=sharding)
