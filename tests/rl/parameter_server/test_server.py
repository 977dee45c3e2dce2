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
from rl.parameter_server.client import connect
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.server import ParameterServer
from tests.rl.parameter_server.deployment import WAYS, Deployment, deploy
from tests.rl.parameter_server.small import constant, host, on_device, publish, pull


@pytest.fixture(params=WAYS, ids=str)
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    made = deploy(request.param)
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
    client = deployment.connect()
    publisher, receiver = client.publisher(), client.receiver(jax.tree.map(jax.numpy.asarray, weights(0)), "worker-0")
    sizes, most = [], 0
    for version in range(5):
        publisher.publish_async(jax.tree.map(jax.numpy.asarray, weights(version)), version).wait()
        assert host(receiver.pull(version)) == host(weights(version))
        assert receiver.stats.read == receiver.stats.needed
        sizes.append(deployment.held())
        most = max(most, sizes[-1])
    directory = client.directory
    assert directory.versions() == [2, 3, 4]
    assert directory.latest() == 4
    assert most <= 4 * sizes[0]
    assert deployment.held_soon(3 * sizes[0]) <= 3 * sizes[0]  # what is not kept takes no memory
    for version in (4, 2, 3):
        assert host(pull(client, weights(0), version)) == host(weights(version))
    with pytest.raises(WeightsError, match=r"version 1 not published within 0\.0\d* s \(held: 2, 3, 4\)"):
        receiver.pull(1, timeout=0.01)


def test_an_empty_server_says_so(deployment: Deployment):
    client = deployment.connect()
    assert (client.directory.latest(), client.directory.versions()) == (-1, [])
    with pytest.raises(WeightsError, match=r"version 0 not published within 0 s \(held: none\)"):
        pull(client, constant(0), 0)


def test_the_same_version_with_the_same_content_is_fine_and_with_other_content_refused(deployment: Deployment):
    client = deployment.connect()
    for version in (0, 1, 1):
        publish(client, constant(version), version)
    with pytest.raises(WeightsError, match="version 1 was published before .* refusing other weights"):
        publish(client, constant(9), 1)
    assert host(pull(client, constant(0), 1)) == host(constant(1))
    for version in (2, 3, 4):
        publish(client, constant(version), version)
    with pytest.raises(WeightsError, match=r"version 1 is older than all that are kept \(held: 2, 3, 4\)"):
        publish(client, constant(1), 1)


def test_after_a_rewind_later_versions_are_made_again_and_may_differ(deployment: Deployment):
    client = deployment.connect()
    for version in range(3):
        publish(client, constant(version), version)
    client.directory.rewind(1)
    assert client.directory.versions() == [0, 1]
    publish(client, constant(7), 2)
    assert host(pull(client, constant(0), 2)) == host(constant(7))
    with pytest.raises(WeightsError, match="version 1 was published before"):
        publish(client, constant(7), 1)


def test_a_waiting_pull_gets_the_version_when_it_is_published(deployment: Deployment):
    client = deployment.connect()
    found: list[Params] = []
    thread = threading.Thread(target=lambda: found.append(pull(client, constant(0), 1, timeout=60)))
    thread.start()
    publish(client, constant(0), 0)
    assert client.directory.latest() == 0  # a wait holds up nobody else
    publish(client, constant(1), 1)
    thread.join(30)
    assert host(found[0]) == host(constant(1))


@pytest.mark.parametrize(
    "other, message",
    [
        (
            {"w": np.zeros(4, np.float32)},
            r"w is float32\[3\] at the parameter server and float32\[4\] in this worker",
        ),
        (
            {"w": np.zeros(3, np.float16)},
            r"w is float32\[3\] at the parameter server and float16\[3\] in this",
        ),
        ({"v": np.zeros(3, np.float32)}, "v is not there at the parameter server and "),
    ],
)
def test_weights_of_another_policy_are_refused(deployment: Deployment, other: Params, message: str):
    client = deployment.connect()
    publish(client, constant(0), 0)
    with pytest.raises(WeightsError, match=message):
        pull(client, other, 0)


def test_contents_that_are_not_what_the_trainers_devices_had_are_refused_on_the_workers(deployment: Deployment):
    """Whatever went wrong between the two, digests of the way included: here the copy from the device."""
    client = deployment.connect()
    publisher = client.publisher()
    taken = publisher.copy(on_device(weights(0)), 0)
    meant = publisher.copy(on_device({**weights(0), "count": np.int32(8)}), 0)
    publisher.publish(dataclasses.replace(taken, marks=meant.marks))
    with pytest.raises(WeightsError, match="version 0: count on this worker's devices is not what the trainer had"):
        pull(client, weights(0), 0)


# ---- versions on disk


def test_versions_that_memory_has_no_room_for_come_back_from_disk_even_after_the_server_died(tmp_path: Path):
    cfg = ParameterServer.Config(keep=2, offload=f"file://{tmp_path}/weights", offload_keep=3, shard_servers=2)
    first = Deployment(cfg, remote=True)
    client = first.connect()
    for version in range(6):
        publish(client, weights(version), version)
    left = {f"weights/server-{server}/v{version}/manifest" for server in range(2) for version in (1, 2, 3)}
    wait_until(lambda: {str(path.relative_to(tmp_path)) for path in tmp_path.glob("weights/*/*/manifest")} == left)
    assert client.directory.versions() == [4, 5]
    for version in (1, 3):
        assert host(pull(client, weights(0), version)) == host(weights(version))
    with pytest.raises(WeightsError, match="version 0 not published"):
        pull(client, weights(0), 0)  # of four that left, three are kept
    first.close()

    second = Deployment(cfg, remote=True)
    client = second.connect()
    assert host(pull(client, weights(0), 2)) == host(weights(2))
    client.directory.rewind(2)  # the trainer restarts from here and will make 3 again
    with pytest.raises(WeightsError, match="version 3 not published"):
        pull(client, weights(0), 3)
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
    client = deployment.connect()
    base = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    changed = base.copy()
    changed[::100] *= np.float32(1 + 1e-6)
    receiver = client.receiver({"w": jax.numpy.asarray(base)})
    publish(client, {"w": base}, 0)
    receiver.pull(0)
    assert receiver.stats.network == base.nbytes  # nothing to add it to yet
    publish(client, {"w": changed}, 1)
    assert host(receiver.pull(1)) == host({"w": changed})
    assert receiver.stats.network < base.nbytes / 50
    newcomer = client.receiver({"w": jax.numpy.asarray(base)})
    assert host(newcomer.pull(1)) == host({"w": changed})
    assert newcomer.stats.network == base.nbytes


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_what_is_approximate_says_so_and_is_near(codec: str):
    deployment = Deployment(ParameterServer.Config(codec=codec, shared_memory=False), remote=True)
    client = deployment.connect()
    params = {"w": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)}
    publish(client, params, 0)
    receiver = client.receiver(jax.tree.map(jax.numpy.asarray, params))
    error = np.abs(np.asarray(receiver.pull(0)["w"]) - params["w"])
    deployment.close()
    assert 0 < error.max() < 0.05
    assert receiver.approximations == (f"{codec}-weights",)
    assert receiver.stats.network < 0.6 * receiver.stats.needed


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
        ({"keep": 0}, "ParameterServer.keep: expected 1 or more, got 0"),
        ({"shard_servers": 0}, "ParameterServer.shard_servers: expected 1 or more, got 0"),
        ({"codec": "detla"}, "ParameterServer.codec: no tensor codec 'detla'; .*delta"),
        ({"offload": "gcs://b/x"}, "ParameterServer.offload: .*unknown scheme 'gcs'; did you mean 'gs'"),
    ],
)
def test_bad_sizes_and_names_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        ParameterServer.Config().set(**changes).build()


def test_a_server_that_is_gone_is_a_clear_error():
    server = ParameterServer.Config().build()
    endpoint = server.listen()
    server.close()
    client = connect(ParameterServer.Config(), [lambda: endpoint], retry_timeout=0.5)
    with pytest.raises(WeightsError, match=rf"parameter server 127.0.0.1:{endpoint.port}: latest failed"):
        client.directory.latest()


def test_a_server_that_was_started_again_elsewhere_is_found_and_filled():
    """The parameter server's process was killed: its successor listens on another port and is empty."""
    cfg = ParameterServer.Config(shared_memory=False)
    old, new = cfg.build(token="secret"), cfg.build(token="secret")
    places = [old.listen(), new.listen()]
    client = connect(cfg, [lambda: places[0]])
    publisher = client.publisher()
    snapshot = publisher.copy(jax.tree.map(jax.numpy.asarray, constant(3)), 3)
    publisher.publish(snapshot)
    old.close()
    del places[0]
    assert client.directory.versions() == []
    publisher.publish(snapshot)
    assert host(pull(client, constant(0), 3)) == host(constant(3))
    new.close()
