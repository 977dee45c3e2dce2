"""A cheap model of memory, from the traced step alone: to say at once what cannot fit."""

import math

import jax

from mesh.ahead_of_time import Compiled


def remat_presets() -> list[str]:
    """Names that `Decoder.Config.remat` takes, from the most memory to the least."""
    try:
        from axlearn_like.layers.remat import PRESETS
    except ImportError:
        return ["nothing", "everything"]
    return list(PRESETS)


def state_bytes(compiled: Compiled) -> int:
    """Arguments of one device: parameters, optimizer state and batch."""
    leaves = [aval for aval in compiled.jaxpr.in_avals]
    return sum(math.prod(aval.sharding.shard_shape(aval.shape)) * aval.dtype.itemsize for aval in leaves)


def describe(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of one device."""
    shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
    return math.prod(shape) * leaf.dtype.itemsize
