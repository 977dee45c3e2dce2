"""Fixtures: an RPC server and its client; the server's operations are in rpc_bed.py."""

from collections.abc import Iterator

import pytest

from rl.parameter_server.transport.client import RpcClient
from rl.parameter_server.transport.server import RpcServer
from tests.rl.parameter_server.transport.rpc_bed import Store


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def server(store: Store) -> Iterator[RpcServer]:
    running = RpcServer(store)
    yield running
    store.release.set()
    running.close()


@pytest.fixture
def client(server: RpcServer) -> Iterator[RpcClient]:
    asking = RpcClient(server.endpoint, name="parameter server")
    yield asking
    asking.close()
