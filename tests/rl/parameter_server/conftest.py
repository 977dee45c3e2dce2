"""A server of the wire and a client of it; what the server does is in wire_bed.py."""

from collections.abc import Iterator

import pytest

from rl.parameter_server.transport.wire import Client, Server
from tests.rl.parameter_server.transport.wire_bed import Store


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def server(store: Store) -> Iterator[Server]:
    running = Server(store)
    yield running
    store.release.set()
    running.close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    asking = Client(server.endpoint, name="parameter server")
    yield asking
    asking.close()
