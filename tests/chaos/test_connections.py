"""Connections to the parameter server that break at any byte, stall or crawl: weights arrive whole."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from axlearn_like.layers.base import Params
from rl.parameter_server.client import ParameterServerClient, connect, connect_local
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.transport.endpoint import Endpoint
from tests.chaos.proxy import ConnectionFault, FaultKind, Proxy
from tests.rl.parameter_server.small import host, publish, pull

SIZE = 20_000  # float32 of one version: several of the proxy's portions
CFG = ParameterServer.Config(keep=3, shared_memory=False)


def version(number: int) -> Params:
    """Weights of random numbers."""
    return {"w": np.random.default_rng(number).standard_normal(SIZE).astype(np.float32)}


def through(proxy: Proxy, server: ParameterServer, retry_timeout: float = 30.0) -> ParameterServerClient:
    """Connect like a role that always asks for the server's address, and gets that of the proxy."""
    endpoint = Endpoint("127.0.0.1", proxy.port, server.listen().token)
    where: Callable[[], Endpoint] = lambda: endpoint  # noqa: E731
    return connect(CFG, [where], retry_timeout=retry_timeout, connect_timeout=1.0)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_every_version_arrives_whole_through_connections_that_fail_in_turn(seed: int) -> None:
    rng = random.Random(seed)
    kinds: tuple[FaultKind, ...] = ("none", "reset", "cut", "throttle", "refuse")
    faults = [
        ConnectionFault(rng.choice(kinds), rng.choice(("up", "down")), rng.randrange(4 * SIZE)) for _ in range(60)
    ]
    server = CFG.build()
    with Proxy(server.listen().port, [ConnectionFault("silence"), *faults]) as proxy:
        for number in range(8):
            publish(through(proxy, server), version(number), number)
            client = through(proxy, server)
            assert host(pull(client, version(0), number, timeout=5.0)) == host(version(number))
            assert client.directory.latest() == number
        assert proxy.connections > 3 * 8, "some connections had to be repeated"
    server.close()


def test_a_push_that_breaks_off_shows_nothing_of_its_version() -> None:
    server = CFG.build()
    with Proxy(server.listen().port, [ConnectionFault("cut", "up", SIZE)] * 2) as proxy:
        impatient = through(proxy, server, retry_timeout=0.0)
        with pytest.raises(WeightsError, match="write failed"):
            publish(impatient, version(0), 0)
        assert connect_local(server).directory.latest() == -1
        publish(through(proxy, server), version(0), 0)
        assert connect_local(server).directory.latest() == 0
    server.close()


def test_a_server_that_is_never_there_is_named_after_the_retry_timeout() -> None:
    server = CFG.build()
    with Proxy(server.listen().port, [ConnectionFault("refuse")] * 1000) as proxy:
        with pytest.raises(WeightsError, match=rf"parameter server 127.0.0.1:{proxy.port}: latest failed: "):
            through(proxy, server, retry_timeout=1.0).directory.latest()
    server.close()
