"""Lower bounds of memory from the traced step alone, which rule out before compiling what cannot fit."""

import math
from typing import Any

from axlearn_like.remat import PRESETS
from mesh.cost.traced_buffers import kept_for_backward


def remat_presets() -> list[str]:
    """Return the names that `Decoder.Config.remat` takes, from the most memory to the least."""
    return list(PRESETS)


def argument_bytes(jaxpr: Any) -> int:
    """Return the bytes that a traced program reads, per device: parameters, optimizer state and batch."""
    avals = jaxpr.in_avals
    return sum(math.prod(aval.sharding.shard_shape(aval.shape)) * aval.dtype.itemsize for aval in avals)


def at_least(jaxpr: Any) -> int:
    """Return the bytes of one device that a train step needs at least.

    These are its arguments and what it keeps for the backward pass; gradients, logits and temporaries come on top.
    """
    return argument_bytes(jaxpr) + kept_for_backward(jaxpr)
