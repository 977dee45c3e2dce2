"""Versions are rounded into memory that is free again, and into none that is still read."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import Params
from rl.parameter_server.client import connect_local
from rl.parameter_server.fingerprint import fingerprints
from rl.parameter_server.push.publisher import Publisher
from rl.parameter_server.push.snapshot import Snapshot
from rl.parameter_server.server import ParameterServer
from tests.rl.parameter_server.small import host

SHAPE = (300, 500)


def weights(version: int) -> Params:
    return {"w": jnp.asarray(np.random.default_rng(version).standard_normal(SHAPE, np.float32))}


def rounded(version: int) -> Params:
    return {"w": weights(version)["w"].astype(jnp.bfloat16)}


@pytest.fixture
def publisher() -> Publisher:
    server = ParameterServer(ParameterServer.Config(keep=3))
    as_read = lambda path, dtype: np.dtype(jnp.bfloat16)  # noqa: E731
    return Publisher(connect_local(server).directory, [server.shard_server], shared_memory=False, dtypes=as_read)


def address(snapshot: Snapshot) -> int:
    return snapshot.owned[0].array.__array_interface__["data"][0]


@pytest.mark.slow
def test_a_version_without_readers_gives_its_memory_to_the_next(publisher: Publisher):
    seen = []
    for version in range(4):
        snapshot = publisher.copy(weights(version), version)
        seen.append(address(snapshot))
        assert snapshot.fingerprints == fingerprints(rounded(version))
        del snapshot
        gc.collect()
    assert len(set(seen)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("held", ["snapshot", "array", "device array"])
def test_a_version_that_is_read_is_not_overwritten(publisher: Publisher, held: str):
    first = publisher.copy(weights(0), 0)
    reading = first if held == "snapshot" else first.owned[0].array
    reading = jax.device_put(reading) if held == "device array" else reading
    addresses = {address(first)}
    del first
    for version in range(1, 4):
        snapshot = publisher.copy(weights(version), version)
        addresses.add(address(snapshot))
        assert host({"w": jnp.asarray(snapshot.owned[0].array)}) == host(rounded(version))
        del snapshot
        gc.collect()
    assert len(addresses) == 2
    array = reading.owned[0].array if isinstance(reading, Snapshot) else np.asarray(reading)
    assert host({"w": jnp.asarray(array)}) == host(rounded(0))
