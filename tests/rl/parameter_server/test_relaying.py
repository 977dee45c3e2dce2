"""Workers that have a version serve it to others: the server sends one copy, and whoever serves may die."""

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from rl.parameter_server.client import WeightAccess, connect
from rl.parameter_server.pull.receiver import Puller
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.shard_server import Answer, Holder
from tests.rl.parameter_server.small import host, on_device, publish
from tests.rl.parameter_server.test_server import Deployment

WEIGHTS = {
    "w": np.random.default_rng(0).standard_normal((500, 100)).astype(np.float32),
    "b": np.arange(7, dtype=np.float32),
}
NBYTES = sum(array.nbytes for array in WEIGHTS.values())


class Sent:
    """Counts what a holder has sent."""

    def __init__(self, holder: Holder):
        self.nbytes, self._read, self._lock = 0, holder.read, threading.Lock()
        holder.read = self.read  # pyright: ignore

    def read(self, *args: object) -> list[Answer]:
        answers = self._read(*args)  # pyright: ignore
        with self._lock:
            self.nbytes += sum(memoryview(answer.data).nbytes for answer in answers)
        return answers


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment(ParameterServer.Config(shared_memory=False, keep=3), remote=True)
    yield made
    made.close()


def workers(deployment: Deployment, count: int) -> list[tuple[WeightAccess, Puller]]:
    accesses = [deployment.access() for _ in range(count)]
    return [(access, access.puller(on_device(WEIGHTS), f"worker-{i}")) for i, access in enumerate(accesses)]


def test_eight_workers_take_one_copy_from_the_server(deployment: Deployment):
    sent = Sent(deployment.servers[0].holder)
    fleet = workers(deployment, 8)
    access = deployment.access()
    for version in range(2):
        params = jax.tree.map(lambda array, version=version: array + version, WEIGHTS)
        publish(access, params, version)
        sent.nbytes = 0
        with ThreadPoolExecutor(8) as pool:
            pulled = list(pool.map(lambda worker, version=version: worker[1].pull(version, 60), fleet))
        assert all(host(one) == host(params) for one in pulled)
        assert sent.nbytes == NBYTES
        assert sorted(puller.moved.by for _, puller in fleet) == ["server"] + ["worker"] * 7
        assert all(puller.moved.read == puller.moved.needed for _, puller in fleet)
    for one, _ in fleet:
        one.close()


def test_a_source_that_died_is_passed_over(deployment: Deployment):
    sent = Sent(deployment.servers[0].holder)
    publish(deployment.access(), WEIGHTS, 0)
    (dead, first), (_, second), (_, third) = workers(deployment, 3)
    first.pull(0, 60)
    dead.close()
    for puller in (second, third):
        assert host(puller.pull(0, 60)) == host(WEIGHTS)
    assert (second.moved.by, third.moved.by) == ("server", "worker")
    assert sent.nbytes == 2 * NBYTES


def test_a_source_whose_memory_is_damaged_is_passed_over(deployment: Deployment):
    publish(deployment.access(), WEIGHTS, 0)
    (_, first), (_, second) = workers(deployment, 2)
    first.pull(0, 60)
    store = first._relaying.holder.store  # pyright: ignore
    key = store.versions()[0]
    store.digest(key, "w", ((0, 500), (0, 100)))  # known before the damage
    address = store.read(key, "w", ((0, 500), (0, 100))).__array_interface__["data"][0]
    ctypes.memset(address + 4000, 0x55, 1)  # it is read-only for everybody else
    assert host(second.pull(0, 60)) == host(WEIGHTS)
    assert second.moved.by == "server"


def test_a_reader_that_died_holds_up_nobody(deployment: Deployment):
    """It was given a place and never came back: the place is free when its patience is over."""
    publish(deployment.access(), WEIGHTS, 0)
    directory = deployment.servers[0].directory
    assert directory is not None
    clock = [0.0]
    directory._relays._clock = lambda: clock[0]  # pyright: ignore
    ((_, puller),) = workers(deployment, 1)
    assert directory.grant("dead", "nowhere", puller._share, 0) is not None
    assert directory.grant("worker-0", "somewhere", puller._share, 0) is None
    clock[0] += 1000.0
    assert host(puller.pull(0, 60)) == host(WEIGHTS)


def test_a_directory_that_was_started_again_learns_who_serves_from_those_who_read():
    """Workers outlive the parameter server: what they have read from its successor they serve."""
    cfg = ParameterServer.Config(shared_memory=False)
    old, new = cfg.build(token="secret"), cfg.build(token="secret")
    places = [old.listen(), new.listen()]
    accesses = [connect(cfg, [lambda: places[0]]) for _ in range(3)]
    pullers = [access.puller(on_device(WEIGHTS), f"worker-{i}") for i, access in enumerate(accesses)]
    publish(accesses[0], WEIGHTS, 0)
    for puller in pullers:
        puller.pull(0, 60)
    old.close()
    del places[0]
    publish(accesses[0], WEIGHTS, 1)
    for puller in pullers:
        assert host(puller.pull(1, 60)) == host(WEIGHTS)
    assert [puller.moved.by for puller in pullers] == ["server", "worker", "worker"]
    for access in accesses:
        access.close()
    new.close()
