"""Index ranges on the host as arrays on the devices that need them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from axlearn_like.checkpoint.plain.plain_arrays import EntriesStruct, StackEntries
from rl.parameter_server.index_ranges import IndexRange

type Needed = Mapping[IndexRange, Sequence[Any]]  # devices by index range


def place(arrays: Mapping[IndexRange, np.ndarray], needed: Needed, leaf: Any) -> jax.Array | StackEntries:
    """Return a tensor on the devices of this process; without a copy where these are the CPU of the host.

    Args:
        arrays: its index ranges.
        needed: the devices that need them.
        leaf: shape and sharding. Of an `EntriesStruct` whose first axis is whole come its entries, in arrays of their
            own, so nobody has to cut the stack.
    """
    parts = [(arrays[index_range], device) for index_range, devices in needed.items() for device in devices]
    if not isinstance(leaf, EntriesStruct) or any(part.shape[0] != leaf.shape[0] for part, _ in parts):
        return _assembled(parts, leaf.shape, leaf.sharding)
    of_an_entry = leaf.of_an_entry
    return StackEntries(
        [
            _assembled([(part[index], device) for part, device in parts], leaf.shape[1:], of_an_entry)
            for index in range(leaf.shape[0])
        ]
    )


def _assembled(parts: Sequence[tuple[np.ndarray, Any]], shape: Sequence[int], sharding: Sharding) -> jax.Array:
    placed = [jax.device_put(part, device) for part, device in parts]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, placed)
