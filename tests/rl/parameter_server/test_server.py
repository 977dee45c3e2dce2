"""Versions are whole, immutable, never reused, verified and waited for: in one process and over sockets."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.layers.base import Params
from mesh import UserError
from rl.parameter_server.client import WeightAccess, connect
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.server import ParameterServer
from tests.rl.parameter_server.small import constant, host, on_device, publish, pull


class Deployment:
    """A parameter server of some shards, and how a role reaches it."""

    def __init__(self, cfg: ParameterServer.Config, *, remote: bool):
        others = [ParameterServer(cfg, index=index) for index in range(1, cfg.shards)]
        self.servers = [ParameterServer(cfg, others=[other.holder for other in others]), *others]
        self.cfg, self.remote = cfg, remote
        self._accesses: list[WeightAccess] = []

    def access(self) -> WeightAccess:
        if not self.remote:
            return self.servers[0].access()
        self._accesses.append(connect(self.cfg, [server.listen for server in self.servers]))
        return self._accesses[-1]

    def held(self) -> int:
        return sum(server.holder.store.nbytes() for server in self.servers)

    def close(self) -> None:
        for access in self._accesses:
            access.close()
        for server in self.servers:
            server.close()


WAYS = {
    "in one process": {"remote": False},
    "shared memory": {"remote": True},
    "sockets": {"remote": True, "shared_memory": False},
    "three shards": {"remote": True, "shared_memory": False, "shards": 3},
    "deltas": {"remote": True, "shared_memory": False, "codec": "delta"},
}


@pytest.fixture(params=WAYS, ids=str)
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    changes: dict[str, Any] = dict(WAYS[request.param])
    made = Deployment(
        ParameterServer.Config(keep=3).set(**{k: v for k, v in changes.items() if k != "remote"}),
        remote=changes["remote"],
    )
    yield made
    made.close()


def weights(seed: int) -> Params:
    """Several shapes and types, one of each awkward kind."""
    rng = np.random.default_rng(seed)
    return {
        "layers": {"w": rng.standard_normal((3, 40, 7)).astype(np.float32), "scale": np.ones((3, 7), np.float32)},
        "embed": jax.numpy.asarray(rng.standard_normal((65, 9)), jax.numpy.bfloat16),
        "count": np.int32(seed),
        "nothing": np.zeros((0, 4), np.float32),
    }


def test_what_was_published_is_pulled_to_the_bit_and_old_versions_go(deployment: Deployment):
    access = deployment.access()
    publisher, puller = access.publisher(), access.puller(jax.tree.map(jax.numpy.asarray, weights(0)), "worker-0")
    sizes = []
    for version in range(5):
        publisher.begin(jax.tree.map(jax.numpy.asarray, weights(version)), version).wait()
        assert host(puller.pull(version)) == host(weights(version))
        assert puller.moved.read == puller.moved.needed
        sizes.append(deployment.held())
    directory = access.directory
    assert directory.versions() == [2, 3, 4]
    assert (directory.oldest(), directory.latest()) == (2, 4)
    assert sizes[4] <= 3 * sizes[0]  # what is not kept takes no memory
    for version in (4, 2, 3):
        assert host(pull(access, weights(0), version)) == host(weights(version))
    with pytest.raises(WeightsError, match=r"version 1 not published within 0.01 s \(held: 2, 3, 4\)"):
        puller.pull(1, timeout=0.01)


def test_an_empty_server_says_so(deployment: Deployment):
    access = deployment.access()
    assert (access.directory.oldest(), access.directory.latest(), access.directory.versions()) == (-1, -1, [])
    with pytest.raises(WeightsError, match=r"version 0 not published within 0 s \(held: none\)"):
        pull(access, constant(0), 0)


def test_the_same_version_with_the_same_content_is_fine_and_with_other_content_refused(deployment: Deployment):
    access = deployment.access()
    for version in (0, 1, 1):
        publish(access, constant(version), version)
    with pytest.raises(WeightsError, match="version 1 was published before .* refusing other weights"):
        publish(access, constant(9), 1)
    assert host(pull(access, constant(0), 1)) == host(constant(1))
    for version in (2, 3, 4):
        publish(access, constant(version), version)
    with pytest.raises(WeightsError, match=r"version 1 is older than all that are kept \(held: 2, 3, 4\)"):
        publish(access, constant(1), 1)


def test_after_a_rewind_later_versions_are_made_again_and_may_differ(deployment: Deployment):
    access = deployment.access()
    for version in range(3):
        publish(access, constant(version), version)
    access.directory.rewind(1)
    assert access.directory.versions() == [0, 1]
    publish(access, constant(7), 2)
    assert host(pull(access, constant(0), 2)) == host(constant(7))
    with pytest.raises(WeightsError, match="version 1 was published before"):
        publish(access, constant(7), 1)


def test_a_waiting_pull_gets_the_version_when_it_is_published(deployment: Deployment):
    access = deployment.access()
    found: list[Params] = []
    thread = threading.Thread(target=lambda: found.append(pull(access, constant(0), 1, timeout=60)))
    thread.start()
    publish(access, constant(0), 0)
    assert access.directory.latest() == 0  # a wait holds up nobody else
    publish(access, constant(1), 1)
    thread.join(30)
    assert host(found[0]) == host(constant(1))


@pytest.mark.parametrize(
    "other, message",
    [
        ({"w": np.zeros(4, np.float32)}, r"w is \(3,\) at the parameter server and \(4,\) in this worker's policy"),
        ({"v": np.zeros(3, np.float32)}, "v is not there at the parameter server and "),
    ],
)
def test_weights_of_another_policy_are_refused(deployment: Deployment, other: Params, message: str):
    access = deployment.access()
    publish(access, constant(0), 0)
    with pytest.raises(WeightsError, match=message):
        pull(access, other, 0)


def test_float32_is_pulled_as_bfloat16_where_the_policy_wants_that(deployment: Deployment):
    access = deployment.access()
    rounded = jax.tree.map(lambda x: jax.numpy.asarray(x).astype(jax.numpy.bfloat16), weights(0)["layers"])
    like = {**weights(0), "layers": rounded}
    publish(access, weights(0), 0)
    puller = access.puller(jax.tree.map(jax.numpy.asarray, like))
    assert host(puller.pull(0)) == host(like)
    if deployment.remote:
        assert puller.moved.travelled + puller.moved.mapped < sum(x.nbytes for x in jax.tree.leaves(weights(0)))


def test_contents_that_are_not_what_the_trainers_devices_had_are_refused_on_the_workers(deployment: Deployment):
    """Whatever went wrong between the two, digests of the way included: here the copy from the device."""
    access = deployment.access()
    publisher = access.publisher()
    taken = publisher.copy(on_device(weights(0)), 0)
    meant = publisher.copy(on_device({**weights(0), "count": np.int32(8)}), 0)
    publisher.publish(dataclasses.replace(taken, marks=meant.marks))
    with pytest.raises(WeightsError, match="version 0: count on this worker's devices is not what the trainer had"):
        pull(access, weights(0), 0)


# ---- versions on disk


def test_versions_that_memory_has_no_room_for_come_back_from_disk_even_after_the_server_died(tmp_path: Path):
    cfg = ParameterServer.Config(keep=2, spill=f"file://{tmp_path}/weights", spill_keep=3, shards=2)
    first = Deployment(cfg, remote=True)
    access = first.access()
    for version in range(6):
        publish(access, weights(version), version)
    left = {f"weights/shard-{shard}/v{version}/manifest" for shard in range(2) for version in (1, 2, 3)}
    wait_until(lambda: {str(path.relative_to(tmp_path)) for path in tmp_path.glob("weights/*/*/manifest")} == left)
    assert access.directory.versions() == [4, 5]
    for version in (1, 3):
        assert host(pull(access, weights(0), version)) == host(weights(version))
    with pytest.raises(WeightsError, match="version 0 not published"):
        pull(access, weights(0), 0)  # of four that left, three are kept
    first.close()

    second = Deployment(cfg, remote=True)
    access = second.access()
    assert host(pull(access, weights(0), 2)) == host(weights(2))
    access.directory.rewind(2)  # the trainer restarts from here and will make 3 again
    with pytest.raises(WeightsError, match="version 3 not published"):
        pull(access, weights(0), 3)
    second.close()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ---- deltas and approximations


def test_a_delta_is_a_fraction_and_gives_the_same_bits(deployment: Deployment):
    if deployment.cfg.codec != "delta":
        return
    access = deployment.access()
    base = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    changed = base.copy()
    changed[::100] *= np.float32(1 + 1e-6)
    puller = access.puller({"w": jax.numpy.asarray(base)})
    publish(access, {"w": base}, 0)
    puller.pull(0)
    assert puller.moved.travelled == base.nbytes  # nothing to add it to yet
    publish(access, {"w": changed}, 1)
    assert host(puller.pull(1)) == host({"w": changed})
    assert puller.moved.travelled < base.nbytes / 50
    newcomer = access.puller({"w": jax.numpy.asarray(base)})
    assert host(newcomer.pull(1)) == host({"w": changed})
    assert newcomer.moved.travelled == base.nbytes


def test_key_versions_travel_whole():
    deployment = Deployment(ParameterServer.Config(codec="delta", key_every=2, shared_memory=False), remote=True)
    access = deployment.access()
    puller = access.puller(jax.tree.map(jax.numpy.asarray, constant(0, 5000)))
    travelled = []
    for version in range(4):
        publish(access, constant(version, 5000), version)
        puller.pull(version)
        travelled.append(puller.moved.travelled == 20_000)
    deployment.close()
    assert travelled == [True, False, True, False]


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_what_is_approximate_says_so_and_is_near(codec: str):
    deployment = Deployment(ParameterServer.Config(codec=codec, shared_memory=False), remote=True)
    access = deployment.access()
    params = {"w": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)}
    publish(access, params, 0)
    puller = access.puller(jax.tree.map(jax.numpy.asarray, params))
    error = np.abs(np.asarray(puller.pull(0)["w"]) - params["w"])
    deployment.close()
    assert 0 < error.max() < 0.05
    assert puller.approximations == (f"{codec}-weights",)
    assert puller.moved.travelled < 0.6 * puller.moved.needed


# ---- what cannot be


def test_a_port_in_use_is_a_clear_error():
    server = ParameterServer.Config().build()
    taken = ParameterServer.Config(port=server.listen().port).build()
    with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{server.listen().port}: .*any free port"):
        taken.listen()
    server.close()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"keep": 0}, "parameter_server.keep=0; expected 1 or more"),
        ({"shards": 0}, "parameter_server.shards=0; expected 1 or more"),
        ({"codec": "detla"}, "no tensor codec 'detla'; .*delta"),
    ],
)
def test_bad_sizes_and_names_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        ParameterServer.Config().set(**changes).build()


def test_a_server_that_is_gone_is_a_clear_error():
    server = ParameterServer.Config().build()
    endpoint = server.listen()
    server.close()
    access = connect(ParameterServer.Config(), [lambda: endpoint], patience=0.5)
    with pytest.raises(WeightsError, match=rf"parameter server 127.0.0.1:{endpoint.port}: latest failed"):
        access.directory.latest()


def test_a_server_that_was_started_again_elsewhere_is_found_and_filled():
    """The parameter server's process was killed: its successor listens on another port and is empty."""
    cfg = ParameterServer.Config(shared_memory=False)
    old, new = cfg.build(token="secret"), cfg.build(token="secret")
    places = [old.listen(), new.listen()]
    access = connect(cfg, [lambda: places[0]])
    publisher = access.publisher()
    snapshot = publisher.copy(jax.tree.map(jax.numpy.asarray, constant(3)), 3)
    publisher.publish(snapshot)
    old.close()
    del places[0]
    assert access.directory.versions() == []
    publisher.publish(snapshot)
    assert host(pull(access, constant(0), 3)) == host(constant(3))
    new.close()
