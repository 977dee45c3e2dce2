"""Peer-to-peer broadcast between workers: the server sends one copy, and a serving worker may die."""

import ctypes
import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from rl.parameter_server.client import ParameterServerClient, connect
from rl.parameter_server.fingerprint import digest_of
from rl.parameter_server.pull.receiver import Receiver
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.shard_server import LocalShardServer, ReadReply
from tests.rl.parameter_server.small import host, on_device, publish
from tests.rl.parameter_server.test_server import Deployment

WEIGHTS = {
    "w": np.random.default_rng(0).standard_normal((500, 100)).astype(np.float32),
    "b": np.arange(7, dtype=np.float32),
}
NBYTES = sum(array.nbytes for array in WEIGHTS.values())


class Sent:
    """Counter of the bytes that a shard server has sent."""

    def __init__(self, shard_server: LocalShardServer):
        self.nbytes, self._read, self._lock = 0, shard_server.read, threading.Lock()
        shard_server.read = self.read  # pyright: ignore

    def read(self, *args: object) -> list[ReadReply]:
        answers = self._read(*args)  # pyright: ignore
        with self._lock:
            self.nbytes += sum(memoryview(answer.data).nbytes for answer in answers)
        return answers


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment(ParameterServer.Config(shared_memory=False, keep=3), remote=True)
    yield made
    made.close()


def workers(deployment: Deployment, count: int) -> list[tuple[ParameterServerClient, Receiver]]:
    clients = [deployment.connect() for _ in range(count)]
    return [(client, client.receiver(on_device(WEIGHTS), f"worker-{i}")) for i, client in enumerate(clients)]


def test_eight_workers_take_one_copy_from_the_server(deployment: Deployment):
    sent = Sent(deployment.servers[0].shard_server)
    fleet = workers(deployment, 8)
    client = deployment.connect()
    for version in range(2):
        params = jax.tree.map(lambda array, version=version: array + version, WEIGHTS)
        publish(client, params, version)
        sent.nbytes = 0
        with ThreadPoolExecutor(8) as pool:
            pulled = list(pool.map(lambda worker, version=version: worker[1].pull(version, 60), fleet))
        assert all(host(one) == host(params) for one in pulled)
        assert sent.nbytes == NBYTES
        assert sorted(receiver.stats.source for _, receiver in fleet) == ["server"] + ["worker"] * 7
        assert all(receiver.stats.read == receiver.stats.needed for _, receiver in fleet)
    for one, _ in fleet:
        one.close()


def test_a_source_that_died_is_passed_over(deployment: Deployment):
    sent = Sent(deployment.servers[0].shard_server)
    publish(deployment.connect(), WEIGHTS, 0)
    (dead, first), (_, second), (_, third) = workers(deployment, 3)
    first.pull(0, 60)
    dead.close()
    for receiver in (second, third):
        assert host(receiver.pull(0, 60)) == host(WEIGHTS)
    assert (second.stats.source, third.stats.source) == ("server", "worker")
    assert sent.nbytes == 2 * NBYTES


def test_a_source_whose_memory_is_damaged_is_passed_over(deployment: Deployment):
    publish(deployment.connect(), WEIGHTS, 0)
    (_, first), (_, second) = workers(deployment, 2)
    first.pull(0, 60)
    store = first._peer.shard_server.store  # pyright: ignore
    key = store.versions()[0]
    store.digest(key, "w", ((0, 500), (0, 100)))  # known before the damage
    address = store.read(key, "w", ((0, 500), (0, 100))).__array_interface__["data"][0]
    ctypes.memset(address + 4000, 0x55, 1)  # it is read-only for everybody else
    assert host(second.pull(0, 60)) == host(WEIGHTS)
    assert second.stats.source == "server"


def _lies(reply: ReadReply) -> dict[str, Any]:
    """Return replies that a peer could give in the place of a true one."""
    other = np.zeros(np.asarray(reply.data).shape, np.float32)
    change = dataclasses.replace
    return {
        "other numbers with their digest": change(reply, data=other, digest=digest_of(other)),
        "no digest": change(reply, data=other, digest=""),
        "too short": change(reply, data=b"x"),
        "too long": change(reply, data=bytes(1 << 22)),
        "not bytes": change(reply, data=None),
        "an unknown codec": change(reply, codec="../pickle"),
        "a delta of nothing": change(reply, codec="delta", data=b"\xff" * 64),
        "half the precision": change(reply, codec="bf16", data=bytes(1 << 16)),
        "memory of another name": change(reply, location=("../../../etc/passwd", 0)),
        "memory outside": change(reply, location=("no-such-segment", -(1 << 60))),
        "not a reply": ("raw", "", b""),
    }


LIES = list(_lies(ReadReply("raw", "", np.zeros(1, np.float32))))


@pytest.mark.parametrize("lie", [*LIES, "none", "twice", "an exception", "a reply that is no list"])
def test_a_source_that_lies_is_passed_over(deployment: Deployment, lie: str):
    """The token of a run is all that a peer has to prove, so what it sends is checked as a stranger's."""
    publish(deployment.connect(), WEIGHTS, 0)
    (_, first), (_, second), (_, third) = workers(deployment, 3)
    first.pull(0, 60)
    served = first._peer.shard_server  # pyright: ignore
    read, asked = served.read, []

    def lying(*args: Any) -> Any:
        asked.append(args)
        if lie == "an exception":
            raise RuntimeError("odd")
        if lie == "a reply that is no list":
            return 7
        replies = read(*args)
        if lie in LIES:
            return [_lies(reply)[lie] for reply in replies]
        return [] if lie == "none" else [*replies, *replies]

    served.read = lying  # pyright: ignore
    for receiver in (second, third):
        assert host(receiver.pull(0, 60)) == host(WEIGHTS)
    assert asked and second.stats.source == "server"
    changed = jax.tree.map(lambda array: array + 1, WEIGHTS)
    publish(deployment.connect(), changed, 1)
    assert all(host(receiver.pull(1, 60)) == host(changed) for receiver in (first, second, third))


def test_a_reader_that_died_holds_up_nobody(deployment: Deployment):
    """A reader that never reports frees its slot when its grant expires."""
    publish(deployment.connect(), WEIGHTS, 0)
    directory = deployment.servers[0].directory
    assert directory is not None
    clock = [0.0]
    directory._broadcast._clock = lambda: clock[0]  # pyright: ignore
    ((_, receiver),) = workers(deployment, 1)
    assert directory.grant("dead", "nowhere", receiver._shard_set, 0) is not None
    assert directory.grant("worker-0", "somewhere", receiver._shard_set, 0) is None
    clock[0] += 1000.0
    assert host(receiver.pull(0, 60)) == host(WEIGHTS)


def test_a_directory_that_was_started_again_learns_who_serves_from_those_who_read():
    """Workers outlive the parameter server: what they have read from its successor they serve."""
    cfg = ParameterServer.Config(shared_memory=False)
    old, new = cfg.build(token="secret"), cfg.build(token="secret")
    places = [old.listen(), new.listen()]
    clients = [connect(cfg, [lambda: places[0]]) for _ in range(3)]
    receivers = [client.receiver(on_device(WEIGHTS), f"worker-{i}") for i, client in enumerate(clients)]
    publish(clients[0], WEIGHTS, 0)
    for receiver in receivers:
        receiver.pull(0, 60)
    old.close()
    del places[0]
    publish(clients[0], WEIGHTS, 1)
    for receiver in receivers:
        assert host(receiver.pull(1, 60)) == host(WEIGHTS)
    assert [receiver.stats.source for receiver in receivers] == ["server", "worker", "worker"]
    for client in clients:
        client.close()
    new.close()
