"""Versions that a trainer sends as deltas are the dense ones to the bit, even if a role lags, restarts or dies."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import Params
from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.push.publisher import Publisher
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.pending_deltas import DeltaShard
from rl.parameter_server.store.shard_server import LocalShardServer
from tests.rl.parameter_server.deployment import Deployment
from tests.rl.parameter_server.small import host, pull

SHAPES = {"table": (600, 100), "wide": (40, 30, 50), "thin": (40,), "exact": (900,)}


def masters(version: int, seed: int = 0) -> Params:
    """Float32 weights, of which each version moves all by about a rate of 1e-6."""
    rng = np.random.default_rng(seed)
    first = {name: (0.02 * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}
    return {name: jnp.asarray(array + np.float32(1e-6) * version) for name, array in first.items()}


def read_as(path: str, dtype: np.dtype) -> np.dtype:
    return dtype if path == "exact" else np.dtype(jnp.bfloat16)


def read(version: int) -> Params:
    """The same as workers read it."""
    return {name: array.astype(read_as(name, array.dtype)) for name, array in masters(version).items()}


def publish(publisher: Publisher, *versions: int) -> None:
    for version in versions:
        publisher.publish_async(masters(version), version).wait()


def new_trainer(client: ParameterServerClient) -> Publisher:
    return client.publisher(dtypes=read_as)


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    cfg = ParameterServer.Config(keep=3).set(codec="delta", shared_memory=False, shard_servers=2)
    made = Deployment(cfg, remote=True)
    yield made
    made.close()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Shards that servers have received: the tensor, and True if as a delta."""
    received: list[tuple[str, bool]] = []
    for name, as_delta in (("write", False), ("write_deltas", True)):
        function = getattr(LocalShardServer, name)

        def record(self: LocalShardServer, *arguments, function=function, as_delta=as_delta) -> None:
            function(self, *arguments)
            received.extend((shard[0], as_delta) for shard in arguments[-1])

        monkeypatch.setattr(LocalShardServer, name, record)
    return received


@pytest.mark.slow
def test_workers_that_follow_fall_behind_or_come_late_read_the_dense_weights(
    deployment: Deployment, written: list[tuple[str, bool]]
):
    client = deployment.connect()
    publisher, like = new_trainer(client), read(0)
    follower, behind = client.receiver(like), client.receiver(like)
    for version in range(6):
        written.clear()
        publish(publisher, version)
        sent = {"table": version > 0, "wide": version > 0, "thin": False, "exact": False}
        assert sorted(written) == sorted(sent.items())
        assert host(follower.pull(version)) == host(read(version))
        if version:
            assert follower.stats.network < follower.stats.needed / 10
        if version in (0, 3, 4):
            assert host(behind.pull(version)) == host(read(version))
    for version in (3, 4, 5):
        assert host(pull(client, like, version)) == host(read(version))
    assert client.directory.versions() == [3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("incarnation", ["the same", "another"])
def test_a_server_that_has_lost_the_base_gets_whole_shards(
    deployment: Deployment, written: list[tuple[str, bool]], incarnation: str
):
    client = deployment.connect()
    publisher = new_trainer(client)
    publish(publisher, 0, 1)
    for server in deployment.servers:
        server.shard_server.keep(())
        if incarnation == "another":
            server.shard_server._incarnation += "'"
    written.clear()
    publish(publisher, 2)
    assert sorted(written) == [(name, False) for name in sorted(SHAPES)]
    assert host(pull(client, read(0), 2)) == host(read(2))
    written.clear()
    publish(publisher, 3)
    assert ("table", True) in written
    assert host(pull(client, read(0), 3)) == host(read(3))


def test_a_trainer_that_dies_between_its_deltas_and_its_commit_leaves_nothing(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
):
    client = deployment.connect()
    follower, publisher = client.receiver(read(0)), new_trainer(client)
    publish(publisher, 0)
    follower.pull(0)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    dying = masters(1, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(publisher._directory, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish_async(dying, 1).wait()
    assert client.directory.versions() == [0]
    successor = new_trainer(client)
    publish(successor, 1, 2)
    for version in (1, 2):
        assert host(follower.pull(version)) == host(read(version))


def test_a_delta_that_is_damaged_on_its_way_is_refused(deployment: Deployment, monkeypatch: pytest.MonkeyPatch):
    client = deployment.connect()
    publisher = new_trainer(client)
    publish(publisher, 0)
    write = LocalShardServer.write_deltas

    def damaged(self: LocalShardServer, key: int, base: int, shards: list[DeltaShard]) -> None:
        blob = bytearray(shards[0].blob)
        blob[-1] ^= 1
        write(self, key, base, [shards[0]._replace(blob=bytes(blob)), *shards[1:]])

    monkeypatch.setattr(LocalShardServer, "write_deltas", damaged)
    with pytest.raises(WeightsError, match="delta weights are damaged"):
        publish(publisher, 1)
    assert client.directory.versions() == [0]
    monkeypatch.undo()
    publish(publisher, 1)
    assert host(pull(client, read(0), 1)) == host(jax.tree.map(jnp.asarray, read(1)))
