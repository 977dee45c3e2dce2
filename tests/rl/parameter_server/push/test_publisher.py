"""A version is one's own once it is copied, and what goes wrong on the way is told."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import Params
from rl.parameter_server.client import connect_local
from rl.parameter_server.fingerprint import fingerprints
from rl.parameter_server.push import next_segment
from rl.parameter_server.push.publisher import Publisher
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.buffer_pool import BufferPool
from rl.parameter_server.transport.shared_memory import SharedSegment
from tests.rl.parameter_server.small import host, pull


def params(seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    sizes = {"large": 300_000, "middle": 20_000, "small": 3}
    return {name: jnp.asarray(rng.standard_normal(size, np.float32)) for name, size in sizes.items()}


@pytest.fixture
def server() -> ParameterServer:
    return ParameterServer.Config().build()


@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_that_fails_ends_the_push(server: ParameterServer, shared: bool, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise MemoryError("no room on the host")

    monkeypatch.setattr(SharedSegment if shared else BufferPool, "write" if shared else "empty", fail)
    publisher = Publisher(connect_local(server).directory, [server.shard_server], shared_memory=shared)
    push = publisher.publish_async(params(), 0)
    for wait in (push.wait, push.snapshot):
        with pytest.raises(MemoryError, match="no room on the host"):
            wait()
    assert connect_local(server).directory.latest() == -1


@pytest.mark.parametrize("shared", [False, True])
def test_after_the_copy_the_arrays_may_be_given_up(server: ParameterServer, shared: bool):
    publisher = Publisher(connect_local(server).directory, [server.shard_server], shared_memory=shared)
    update = jax.jit(lambda weights: jax.tree.map(lambda leaf: leaf * 0 - 7, weights), donate_argnums=0)
    for version in range(3):
        weights = params(version)
        push = publisher.publish_async(weights, version)
        snapshot = push.snapshot()
        jax.block_until_ready(update(weights))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(weights))
        push.wait()
        assert host(pull(connect_local(server), params(), version)) == host(params(version))
        assert host(snapshot.params(params())) == host(params(version))


def test_shared_memory_of_the_next_version_is_reserved_once_one_is_published(
    server: ParameterServer, monkeypatch: pytest.MonkeyPatch
):
    reserved = threading.Event()
    monkeypatch.setattr(next_segment.NextSegment, "_reserve", lambda _: reserved.set())
    monkeypatch.setattr(next_segment.NextSegment.__init__, "__defaults__", (0.0,))
    publisher = Publisher(connect_local(server).directory, [server.shard_server], shared_memory=True)
    publisher.publish_async(params(), 0).wait()
    assert reserved.wait(20)


@pytest.mark.parametrize("shared", [False, True])
def test_what_workers_read_rounded_is_published_rounded(server: ParameterServer, shared: bool):
    """Every kind of float32, to the bit as `jnp.astype`, with fingerprints of what was published."""
    numbers = np.concatenate(
        [np.arange(0, 2**32, 9973, dtype=np.uint32), np.array([0x3F808000, 0x3F818000], np.uint32)]
    )
    weights = {"matrix": jnp.asarray(numbers.view(np.float32)), "norm": {"scale": jnp.float32(1) / jnp.arange(1, 9)}}
    rounded = {**weights, "matrix": weights["matrix"].astype(jnp.bfloat16)}
    as_read = lambda path, dtype: np.dtype(jnp.bfloat16 if path == "matrix" else dtype)  # noqa: E731
    publisher = Publisher(connect_local(server).directory, [server.shard_server], shared_memory=shared, dtypes=as_read)
    push = publisher.publish_async(weights, 0)
    push.wait()
    assert host(pull(connect_local(server), rounded, 0)) == host(rounded)
    assert push.snapshot().fingerprints == fingerprints(rounded)
    assert push.snapshot().nbytes == 2 * numbers.size + 4 * 8
    again = push.snapshot().params(weights)  # of the trainer's types, for its checkpoints
    assert host(again) == host(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded))
