"""Arrays from one group of devices to the other, without waiting for them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def transfer[T](tree: T, where: NamedSharding) -> T:
    """Return arrays on other devices, sharded by rows there too; nothing waits for their values.

    `jax.device_put` between groups of different sizes would fetch the values to the host first.
    """
    with jax.set_mesh(Mesh(np.empty((), object), ())):  # pieces are on one device each
        return jax.tree.map(lambda x: _sent(x, where), tree)


def spread[T](scalars: T, mesh: Mesh) -> T:
    """Return scalars that all devices of a group have on all devices of another mesh."""
    where = NamedSharding(mesh, PartitionSpec())

    def one(x: jax.Array) -> jax.Array:
        if _single(x, where):
            return jax.device_put(x, where)
        copies = [jax.device_put(x.addressable_data(0), device) for device in mesh.devices.flat]
        return jax.make_array_from_single_device_arrays(x.shape, where, copies)

    return jax.tree.map(one, scalars)


def _single(x: jax.Array, where: NamedSharding) -> bool:
    """Return True between two devices, of one process or of two: `jax.device_put` does not wait there."""
    return len(x.sharding.device_set) == len(where.device_set) == 1


def _sent(x: jax.Array, where: NamedSharding) -> jax.Array:
    if _single(x, where):
        return jax.device_put(x, where)
    assert all(shard.data.shape[1:] == x.shape[1:] for shard in x.addressable_shards), "sharded by rows alone"
    held = sorted(((_rows(shard.index, x.shape), shard.data) for shard in x.addressable_shards), key=lambda one: one[0])
    indices = where.addressable_devices_indices_map(x.shape)
    pieces = [_piece(held, _rows(index, x.shape), device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(x.shape, where, pieces)


def _piece(held: list[tuple[tuple[int, int], jax.Array]], wanted: tuple[int, int], device: Any) -> jax.Array:
    first, last = wanted
    found: list[jax.Array] = []
    for (low, high), data in held:
        if low <= first < min(high, last):
            end = min(high, last)
            part = data if (low, high) == (first, end) else data[first - low : end - low]
            found.append(jax.device_put(part, device))
            first = end
    return found[0] if len(found) == 1 else jnp.concatenate(found)


def _rows(index: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    first, last, _ = index[0].indices(shape[0])
    return first, last
