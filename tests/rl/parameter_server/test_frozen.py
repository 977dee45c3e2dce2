"""Frozen parameters are copied, pushed and pulled once; every version is whole all the same."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import Params
from rl.parameter_server.client import connect_local
from rl.parameter_server.push.publisher import Publisher
from rl.parameter_server.push.snapshot import Snapshot
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.shard_server import ShardData
from tests.rl.parameter_server.deployment import WAYS, Deployment, deploy
from tests.rl.parameter_server.small import host, pull

FROZEN = ("layers/inner/w", "embed")


def weights(version: int) -> Params:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((3, 40, 70)).astype(np.float32)
    embed = jnp.asarray(rng.standard_normal((65, 90)), jnp.bfloat16)
    factor = np.random.default_rng(version).standard_normal((3, 40, 2)).astype(np.float32)
    return {"layers": {"inner": {"w": jnp.asarray(base)}, "lora": {"w_a": jnp.asarray(factor)}}, "embed": embed}


TRAINED = 3 * 40 * 2 * 4  # bytes
ALL = TRAINED + 3 * 40 * 70 * 4 + 65 * 90 * 2


@pytest.fixture(params=WAYS, ids=str)
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    made = deploy(request.param)
    yield made
    made.close()


def publish_all(publisher: Publisher, versions: int) -> Iterator[Snapshot]:
    before = None
    for version in range(versions):
        push = publisher.publish_async(weights(version), version, frozen=FROZEN, before=before)
        push.wait()
        before = push.snapshot()
        yield before


def test_later_versions_move_what_is_trained_alone(deployment: Deployment):
    client = deployment.connect()
    workers = [client.receiver(weights(0), f"worker-{number}") for number in range(2)]
    for version, snapshot in enumerate(publish_all(client.publisher(), 5)):
        assert snapshot.copied == (TRAINED if version else ALL)
        for worker in workers:
            assert host(worker.pull(version)) == host(weights(version))
            assert worker.stats.read == worker.stats.needed
            # Arrays that are mapped, or lie in this process, are not copied and so not kept.
            over_sockets = deployment.remote and not deployment.cfg.shared_memory
            assert worker.stats.needed == (TRAINED if version and (over_sockets or not deployment.remote) else ALL)
    assert client.directory.versions() == [2, 3, 4]
    for version in (2, 4):  # by a worker that has just started
        assert host(pull(client, weights(0), version)) == host(weights(version))


class Counting:
    """A shard server, and the bytes that were written to it."""

    def __init__(self, server: Any):
        self._server, self.written = server, 0

    def write(self, key: int, shards: Sequence[ShardData]) -> None:
        self.written += sum(array.nbytes for _, _, array, _ in shards)
        self._server.write(key, shards)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


def test_a_server_that_has_lost_them_gets_them_again():
    server = ParameterServer.Config(keep=3).build()
    client, counting = connect_local(server), Counting(server.shard_server)
    publisher = Publisher(client.directory, [cast(Any, counting)], shared_memory=False)
    written = []
    for snapshot in publish_all(publisher, 4):
        written.append(counting.written)
        if snapshot.version == 1:
            server.shard_server.store.drop(*server.shard_server.store.versions())
    assert np.diff(written).tolist() == [TRAINED, ALL, TRAINED] and written[0] == ALL
    assert host(pull(client, weights(0), 3)) == host(weights(3))


def test_a_snapshot_is_published_again_whole():
    server, other = ParameterServer.Config(keep=3).build(), ParameterServer.Config(keep=3).build()
    publisher = Publisher(connect_local(server).directory, [server.shard_server], shared_memory=False)
    *_, last = publish_all(publisher, 3)
    Publisher(connect_local(other).directory, [other.shard_server], shared_memory=False).publish(last)
    assert host(pull(connect_local(other), weights(0), 2)) == host(weights(2))
    assert host(last.params(weights(0))) == host(weights(2))
    assert last.fingerprints == publisher.copy(weights(2), 2).fingerprints
