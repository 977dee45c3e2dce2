"""A version is one's own once it is copied, and what goes wrong on the way is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import Params
from rl.parameter_server.client import connect_local
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
