"""Memory of devices, and the refusal of a train state that they cannot hold."""

import math
import os
from collections.abc import Collection, Mapping, Sequence
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
    params = bytes_of_device(state["params"])
    gradients = bytes_of_device(without(state["params"], frozen))
    optimizer = bytes_of_device(state["opt_state"])
    held = bytes_of_device({name: part for name, part in state.items() if name not in ("step", "params", "opt_state")})
    parts = {"parameters": params, "gradients": gradients, "optimizer": optimizer, "reference policy": held}
    if said := _too_much(parts, mesh):
        raise UserError(f"the train state does not fit: {said}; expected more devices, or a smaller model")


def check_states_fit(
    states: Sequence[Mapping[str, Any]], mesh: Mesh, frozen: Sequence[Collection[str]] = (), *, stacked: int = 0
) -> None:
    """Refuse described train states that are on a device together and need more than it has (UserError).

    Gradients are those of one at a time.

    Args:
        states: the train states.
        mesh: their mesh.
        frozen: paths of each one's parameters that are those of the first one, too: the same arrays; (): none are.
        stacked: states whose parameters and optimizers an update holds a second time; the largest are counted.
    """
    own = [state["params"] for state in states]
    moved = [without(params, names) for params, names in zip(own, frozen or [()] * len(own), strict=True)]
    sizes = [bytes_of_device(params) for params in moved]
    optimizers = [bytes_of_device(state["opt_state"]) for state in states]
    largest = sorted((sum(both) for both in zip(sizes, optimizers, strict=True)), reverse=True)
    parts = {
        "a base": bytes_of_device(own[0]) - sizes[0],
        "parameters": sum(sizes),
        "optimizers": sum(optimizers),
        "gradients of one": max(sizes),
        f"{stacked} stacked for an update": sum(largest[:stacked]) + max(0, stacked - len(largest)) * largest[0],
    }
    if said := _too_much(parts, mesh):
        fewer = f"fewer of them at a time{'' if frozen else ', LoRA adapters of one base (--apply low_rank)'}"
        raise UserError(
            f"the train states of {len(states)} policies do not fit: {said}; expected {fewer}, or more devices"
        )


def _too_much(parts: Mapping[str, int], mesh: Mesh) -> str:
    """Return the sum of what a device is to hold and what it has; "" if that is enough, or not known."""
    first, needed = mesh.local_devices[0], sum(parts.values())
    memory = device_memory(first)
    if memory is None or needed <= memory:
        return ""
    shown = " + ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    return f"{shown} = {_gib(needed)}, and each of the {mesh.size} devices ({first.device_kind}) has {_gib(memory)}"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
