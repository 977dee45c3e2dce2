"""Connections to the parameter server that break at any byte, stall or crawl: weights arrive whole."""

import random

import numpy as np
import pytest

from rl.parameter_server import ParameterServer
from rl.weights.encoding import EncodedWeights, WeightsError, encode
from rl.weights.transport import Endpoint, WeightClient, WeightServer
from tests.chaos.proxy import Harm, Plan, Proxy

SIZE = 20_000  # float32 of one version: several of the proxy's portions


def version(number: int) -> EncodedWeights:
    """Weights of random numbers."""
    values = np.random.default_rng(number).standard_normal(SIZE).astype(np.float32)
    return encode({"w": values}, number)


def through(proxy: Proxy, server: WeightServer) -> WeightClient:
    """A client that always asks where the server is, and is told of the proxy."""
    endpoint = Endpoint("127.0.0.1", proxy.port, server.endpoint.token)
    return WeightClient(lambda: endpoint, connect_timeout=1.0, patience=30.0)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_version_arrives_whole_through_connections_that_fail_in_turn(seed: int) -> None:
    rng = random.Random(seed)
    harms: tuple[Harm, ...] = ("none", "reset", "cut", "throttle", "refuse")
    plans = [Plan(rng.choice(harms), rng.choice(("up", "down")), rng.randrange(4 * SIZE)) for _ in range(60)]
    server = WeightServer(ParameterServer.Config(keep=3).build())
    with Proxy(server.endpoint.port, [Plan("silence"), *plans]) as proxy:
        client = through(proxy, server)
        for number in range(8):
            client.push(version(number))
            pulled = client.pull(number, timeout=5.0)
            assert pulled.manifest == version(number).manifest
            assert bytes(pulled.buffer) == bytes(version(number).buffer)
            assert client.latest() == number
        assert proxy.connections > 3 * 8, "some had to be repeated"
    server.close()


def test_a_push_that_breaks_off_shows_nothing_of_its_version() -> None:
    store = ParameterServer.Config().build()
    server = WeightServer(store)
    with Proxy(server.endpoint.port, [Plan("cut", "up", SIZE)]) as proxy:
        impatient = WeightClient(Endpoint("127.0.0.1", proxy.port, server.endpoint.token), connect_timeout=1.0)
        with pytest.raises(WeightsError, match="push failed"):
            impatient.push(version(0))
        assert store.latest() == -1
        impatient.push(version(0))
        assert store.latest() == 0
    server.close()


def test_a_server_that_is_never_there_is_named_when_patience_ends() -> None:
    server = WeightServer(ParameterServer.Config().build())
    with Proxy(server.endpoint.port, [Plan("refuse")] * 1000) as proxy:
        endpoint = Endpoint("127.0.0.1", proxy.port, server.endpoint.token)
        client = WeightClient(lambda: endpoint, connect_timeout=1.0, patience=1.0)
        with pytest.raises(WeightsError, match=rf"parameter server at 127.0.0.1:{proxy.port}: latest failed: "):
            client.latest()
    server.close()
