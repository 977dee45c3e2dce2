"""A cheap model of memory, from the traced step alone: to say before compiling what cannot fit."""

import math
from typing import Any

from axlearn_like.remat import PRESETS
from mesh.cost.traced_buffers import kept_for_backward


def remat_presets() -> list[str]:
    """Names that `Decoder.Config.remat` takes, from the most memory to the least."""
    return list(PRESETS)


def argument_bytes(jaxpr: Any) -> int:
    """What a traced program reads, per device: parameters, optimizer state and batch."""
    avals = jaxpr.in_avals
    return sum(math.prod(aval.sharding.shard_shape(aval.shape)) * aval.dtype.itemsize for aval in avals)


def at_least(jaxpr: Any) -> int:
    """Bytes of one device without which a train step cannot do: its arguments and what it keeps for the backward
    pass. Gradients, logits and temporaries come on top.
    """
    return argument_bytes(jaxpr) + kept_for_backward(jaxpr)
