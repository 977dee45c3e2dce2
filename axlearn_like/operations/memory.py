"""Memory of devices, and the refusal of a train state that they cannot hold."""

import math
import os
from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from axlearn_like.layers.parameter_names import without
from axlearn_like.learner.state_storage import HOST
from mesh.errors import UserError

_GIB = 1 << 30


def bytes_of_device(described: Any) -> int:
    """Return the bytes of described or real arrays on one device; those in the memory of the host do not count."""
    leaves = (leaf for leaf in jax.tree.leaves(described) if leaf.sharding.memory_kind != HOST)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def device_memory(device: Any) -> int | None:
    """Return the bytes that programs can use on a device; of a CPU its share of the machine's; None: not known."""
    if device.platform == "cpu":
        here = sum(one.process_index == device.process_index for one in device.client.devices())
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, here)
    return (device.memory_stats() or {}).get("bytes_limit")


def check_state_fits(state: Mapping[str, Any], mesh: Mesh, frozen: Collection[str] = ()) -> None:
    """Refuse a described train state whose parameters, gradients and optimizer need more than a device has (UserError).

    What a step needs beside them, `axl aot` tells. `frozen`: paths of parameters that have no gradients.
    """
    first = mesh.local_devices[0]
    memory, params = device_memory(first), bytes_of_device(state["params"])
    gradients = bytes_of_device(without(state["params"], frozen))
    optimizer = bytes_of_device(state["opt_state"])
    held = bytes_of_device({name: part for name, part in state.items() if name not in ("step", "params", "opt_state")})
    needed = params + gradients + optimizer + held
    if memory is None or needed <= memory:
        return
    parts = f"parameters {_gib(params)} + gradients {_gib(gradients)} + optimizer {_gib(optimizer)}"
    parts += f" + reference policy {_gib(held)}" if held else ""
    have = f"each of the {mesh.size} devices ({first.device_kind}) has {_gib(memory)}"
    raise UserError(
        f"the train state does not fit: {parts} = {_gib(needed)}, and {have}; expected more devices, or a smaller model"
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
