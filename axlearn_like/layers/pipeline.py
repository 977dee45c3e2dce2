"""Pipeline parallelism (GPipe, Huang et al. 2019, arXiv 1811.06965): every stage holds some of the layers.

The rows of a batch are split into microbatches that move from stage to stage, one stage a tick; after M + S - 1 ticks
all M have passed the S stages. The backward pass runs in reverse. A stage is idle in S - 1 of the ticks: the bubble, (S
- 1) / (M + S - 1) of the time.
"""

import math
from collections.abc import Callable
from typing import Any, override

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.layers.aux import Aux, reduce_layers
from mesh.errors import UserError
from mesh.rules import axis_sizes, partition
from mesh.sharding import entry_axes, merge_rows, split_rows

AXIS = "pipeline"
# (layers of a stage, x, context) -> (x, aux stacked over these layers)
Stage = Callable[[Any, jax.Array, Any], tuple[jax.Array, Aux]]


class Pipeline(Configurable):
    """The schedule of a stack of layers over the pipeline axis of the mesh; unused where there is none."""

    class Config(ConfigBase["Pipeline"]):
        microbatches: int | None = None  # microbatches of a step; None: four for each stage, a bubble of at most 1/5

        @override
        def check_fields(self) -> None:
            self.require_least(1, "microbatches")

    def __init__(self, cfg: Config):
        self._microbatches = cfg.microbatches

    def __eq__(self, other: object) -> bool:  # needed for equal graph definitions of equal models
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(self._microbatches)

    @property
    def stages(self) -> int:
        """Stages on the current mesh."""
        return axis_sizes("layers").get(AXIS, 1)

    @property
    def microbatches(self) -> int:
        """Parts of the batch."""
        return self._microbatches or 4 * self.stages

    def __call__(self, stage: Stage, layers: Any, x: jax.Array, context: Any) -> tuple[jax.Array, Aux]:
        """Return the output of the whole stack, and its auxiliary outputs.

        Args:
            stage: applies some of the layers, pure.
            layers: pytree of arrays [layers, ...], sharded by the pipeline axis.
            x: [batch, length, dim].
            context: pytree of arrays [batch, ...].

        Raises:
            UserError: the rows do not divide into microbatches.
        """
        count, last = self.microbatches, self.stages - 1
        shards = math.prod(axis_sizes("batch").values())
        if x.shape[0] % (count * shards):
            raise UserError(
                f"Pipeline: a batch of {x.shape[0]} rows does not divide into {count} microbatches "
                f"(Pipeline.Config.microbatches), each sharded over {shards} devices"
            )
        parts = split_rows(x, count), jax.tree.map(lambda leaf: split_rows(leaf, count), context)

        def run(layers: Any, x: jax.Array, context: Any) -> tuple[jax.Array, Aux]:
            return _ticks(stage, layers, x, context, last)

        y, aux = jax.shard_map(
            run,
            in_specs=(PartitionSpec(AXIS), PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(AXIS),
            axis_names={AXIS},
            check_vma=False,  # kernels inside do not declare over which axes their results vary
        )(layers, *parts)
        # Only the result of the last stage counts. This product scatters it over the stages, so that they share the
        # work of the head.
        chosen = jnp.zeros(last + 1, y.dtype).at[last].set(1)
        rows, length, width = jax.typeof(x).sharding.spec
        mesh = jax.sharding.get_abstract_mesh()
        axes = (AXIS, *entry_axes(length))
        over = axes if x.shape[1] % math.prod(mesh.shape[name] for name in axes) == 0 else length
        y = jnp.einsum("smbtd,s->mbtd", y, chosen, out_sharding=PartitionSpec(None, rows, over, width))
        return merge_rows(y), reduce_layers(aux)


def shard_layers(layers: Any, count: int) -> Any:
    """Return a newly created stack [layers, ...], sharded by the pipeline axis.

    Raises:
        UserError: the layers do not divide into stages.
    """
    stages = axis_sizes("layers").get(AXIS, 1)
    if stages == 1:
        return layers
    if count % stages:
        raise UserError(f"Decoder: num_layers={count} do not divide into the mesh's {stages} pipeline stages")
    first = partition("layers")
    assert first is not None
    return jax.tree.map(
        lambda leaf: jax.sharding.reshard(leaf, PartitionSpec(*first, *jax.typeof(leaf).sharding.spec[1:])), layers
    )


def _ticks(stage: Stage, layers: Any, x: jax.Array, context: Any, last: int) -> tuple[jax.Array, Aux]:
    """Return one stage's result, [1, microbatches, rows, ...] for x [microbatches, rows, ...], and its layers' aux."""
    count, index = x.shape[0], jax.lax.axis_index(AXIS)
    first = (index == 0).astype(x.dtype)
    onward = [(i, (i + 1) % (last + 1)) for i in range(last + 1)]

    def tick(received: jax.Array, time: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Aux]]:
        number = time - index  # number of the current microbatch
        valid = ((number >= 0) & (number < count)).astype(jnp.float32)
        at = jnp.clip(number, 0, count - 1)

        def here(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, at, 0, keepdims=False)

        fresh = jax.lax.dynamic_index_in_dim(x, jnp.clip(time, 0, count - 1), 0, keepdims=False)
        y, aux = stage(layers, fresh * first + received * (1 - first), jax.tree.map(here, context))
        aux = Aux(*(jax.tree.map(lambda a: a * valid, part) for part in (aux.losses, aux.metrics)))
        return jax.lax.ppermute(y, AXIS, onward), (y, aux)

    nothing = jax.lax.pcast(jnp.zeros_like(x[0]), (AXIS,), to="varying")
    _, (ys, aux) = jax.lax.scan(tick, nothing, jnp.arange(count + last))

    def over_ticks(name: str, values: jax.Array) -> jax.Array:
        return jnp.max(values, axis=0) if name.endswith("_max") else jnp.sum(values, axis=0) / count

    losses = {name: over_ticks(name, values) for name, values in aux.losses.items()}
    metrics = {name: over_ticks(name, values) for name, values in aux.metrics.items()}
    return ys[last:][None], Aux(losses, metrics)
