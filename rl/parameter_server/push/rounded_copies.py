"""Types into which versions are rounded, and reuse of the arrays for it where the devices are the CPU of this host.

There they are the host copies, too, so a version's arrays are free when no array over their memory is left. New ones
would come from the kernel page by page, which takes several times longer than to round.
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping

import jax
import numpy as np

from axlearn_like.layers.base import Params
from axlearn_like.layers.parameter_names import path_name
from rl.parameter_server.store.arrays import read_only


class ArrayLease:
    """Owner of a rounded array, kept alive by those who read its memory."""

    def __init__(self, array: jax.Array):
        self.array = array


class RoundedCopies:
    """Arrays without readers, by path. `spare` and `lend` are for one thread; leases may end on any."""

    def __init__(self) -> None:
        self._returned: deque[tuple[str, jax.Array]] = deque()  # filled by finalizers, which must not block

    def spare(self) -> dict[str, jax.Array]:
        """Return an array for each path that has one, to be donated; they are no longer here."""
        spare: dict[str, jax.Array] = {}
        while self._returned:
            name, array = self._returned.popleft()
            spare[name] = array
        return spare

    def lend(self, arrays: Mapping[str, jax.Array]) -> dict[str, ArrayLease]:
        """Return the owners of new arrays; they come back when their owners are gone."""
        leases = {name: ArrayLease(array) for name, array in arrays.items()}
        for name, lease in leases.items():
            if on_this_host(lease.array):
                weakref.finalize(lease, self._returned.append, (name, lease.array)).atexit = False
        return leases


def rounded_dtypes(params: Params, read: Callable[[str, np.dtype], np.dtype]) -> dict[str, np.dtype]:
    """Return by path the types of the parameters that are not published in their own (see `Publisher`)."""
    rounded: dict[str, np.dtype] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        held, wanted = np.dtype(leaf.dtype), np.dtype(read(path_name(path), leaf.dtype))
        if (held.name, wanted.name) == ("float32", "bfloat16"):
            rounded[path_name(path)] = wanted
    return rounded


def on_this_host(array: jax.Array) -> bool:
    """Return True if the array lies in the memory of this host's CPU."""
    return all(device.platform == "cpu" for device in array.sharding.device_set)


def host_view(part: jax.Array, lease: ArrayLease) -> np.ndarray:
    """Wait for a shard of a lent array and return it as a read-only view, which keeps the lease."""
    return read_only(np.asarray(part), lease)
