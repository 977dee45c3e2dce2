"""A version leaves while it is still being copied, and is one's own once it is copied."""

import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import Params
from rl.parameter_server import ParameterServer
from rl.weights import publisher as publishing
from rl.weights.snapshot import Copied, Snapshot
from tests.rl.weights.small import host, pull


def params(seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    sizes = {"large": 300_000, "middle": 20_000, "small": 3}
    return {name: jnp.asarray(rng.standard_normal(size, np.float32)) for name, size in sizes.items()}


@pytest.fixture
def server() -> ParameterServer:
    return ParameterServer.Config().build()


def held_back(snapshot: Snapshot) -> tuple[Snapshot, Copied, "Future[np.ndarray]"]:
    """The snapshot as if its last piece were still being copied; that piece, and what it waits for."""
    *others, last = snapshot.owned
    copy: Future[np.ndarray] = Future()
    return dataclasses.replace(snapshot, owned=(*others, dataclasses.replace(last, copy=copy))), last, copy


def test_pieces_leave_while_others_are_being_copied(server: ParameterServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publishing, "_CHUNK", 1)  # each in a request of its own
    publisher = server.access().publisher()
    snapshot, last, copy = held_back(publisher.copy(params(), 0))
    store = server.holder.store
    with ThreadPoolExecutor() as pool:
        publishing_it = pool.submit(publisher.publish, snapshot)
        until = time.monotonic() + 60
        while store.nbytes() < snapshot.nbytes - last.nbytes and time.monotonic() < until:
            time.sleep(0.001)
        assert {piece[0] for key in store.versions() for piece in store.pieces(key)} == {"small", "middle"}
        assert not publishing_it.done() and server.access().directory.latest() == -1
        copy.set_result(last.array)
        publishing_it.result(60)
    assert host(pull(server.access(), params(), 0)) == host(params())


def test_a_copy_that_fails_ends_the_push(server: ParameterServer):
    publisher = server.access().publisher()
    snapshot, _, copy = held_back(publisher.copy(params(), 0))
    copy.set_exception(MemoryError("no room on the host"))
    push = publishing.Push(lambda: snapshot, publisher.publish, lambda _: None)
    for wait in (push.wait, push.snapshot):
        with pytest.raises(MemoryError, match="no room on the host"):
            wait()
    assert server.access().directory.latest() == -1


@pytest.mark.parametrize("shared", [False, True])
def test_after_the_copy_the_arrays_may_be_given_up(server: ParameterServer, shared: bool):
    publisher = publishing.Publisher(server.access().directory, [server.holder], shared_memory=shared)
    update = jax.jit(lambda weights: jax.tree.map(lambda leaf: leaf * 0 - 7, weights), donate_argnums=0)
    for version in range(3):
        weights = params(version)
        push = publisher.begin(weights, version)
        snapshot = push.snapshot()
        jax.block_until_ready(update(weights))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(weights))
        push.wait()
        assert host(pull(server.access(), params(), version)) == host(params(version))
        assert host(snapshot.params(params())) == host(params(version))
