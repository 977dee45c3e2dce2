"""Index ranges become arrays on the devices: stacks whole, or cut into their entries without a copy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.checkpoint.plain.plain_arrays import EntriesStruct, StackEntries
from axlearn_like.layers.base import Params
from mesh import make_mesh
from rl.parameter_server.client import connect_local
from rl.parameter_server.fingerprint import fingerprints
from rl.parameter_server.index_ranges import needed_index_ranges, slices, whole
from rl.parameter_server.pull.fetch import place
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.buffer_pool import BUFFERS
from tests.elsewhere import elsewhere
from tests.rl.parameter_server.small import publish

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def stack(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 8, 64)).astype(np.float32)


def test_entries_on_one_device_are_views_of_the_host_array():
    array = BUFFERS.empty((3, 256, 64), np.float32)
    array[...] = np.random.default_rng(0).standard_normal(array.shape)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    needed = needed_index_ranges(sharding, array.shape)
    placed = place({whole(array.shape): array}, needed, EntriesStruct(array.shape, array.dtype, sharding=sharding))
    assert isinstance(placed, StackEntries)
    start = array.__array_interface__["data"][0]
    assert [entry.unsafe_buffer_pointer() - start for entry in placed] == [0, array[0].nbytes, 2 * array[0].nbytes]


def on_a_mesh(count: int, axes: list[str | None]) -> tuple[str, list[Any], dict[str, str], dict[str, str]]:
    """Return the kind of what is placed, its values, and the fingerprints of it and of the whole array."""
    array, mesh = stack(count), make_mesh({"fsdp": 4, "tensor": 2})
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    needed = needed_index_ranges(sharding, array.shape)
    parts = {index_range: array[slices(index_range, whole(array.shape))] for index_range in needed}
    with jax.set_mesh(mesh):
        placed = place(parts, needed, EntriesStruct(array.shape, array.dtype, sharding=sharding))
    values = [np.asarray(entry).tolist() for entry in placed]
    return type(placed).__name__, values, fingerprints({"w": placed}), fingerprints({"w": jnp.asarray(array)})


@pytest.mark.parametrize(
    ("count", "axes", "are_entries"),
    [(3, [None, "fsdp", "tensor"], True), (3, [None, None, "fsdp"], True), (4, ["fsdp", "tensor"], False)],
)
def test_entries_on_a_mesh_are_sharded_as_the_stack(count: int, axes: list[str | None], are_entries: bool):
    kind, values, found, expected = elsewhere(on_a_mesh, count, axes, environ=EIGHT)
    assert (kind == "StackEntries") == are_entries
    assert np.array_equal(values, stack(count))
    assert found == expected


def test_a_worker_gets_entries_and_checks_them():
    client = connect_local(ParameterServer(ParameterServer.Config(keep=3)))
    params: Params = {"w": np.random.default_rng(1).standard_normal((3, 8, 16)).astype(np.float32)}
    publish(client, params, 0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    receiver = client.receiver({"w": EntriesStruct((3, 8, 16), np.dtype(np.float32), sharding=sharding)})
    pulled = receiver.pull(0)["w"]
    assert isinstance(pulled, StackEntries)
    assert np.array_equal(np.stack([np.asarray(entry) for entry in pulled]), params["w"])
