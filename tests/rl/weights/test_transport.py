"""Weights over a real socket: whole or not at all, and for those who know the token only."""

import dataclasses
import json
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mesh import UserError
from rl.parameter_server import ParameterServer
from rl.weights.encoding import EncodedWeights, WeightsError, decode, encode
from rl.weights.transport import Endpoint, WeightClient, WeightServer
from tests.rl.tiny import tiny_params, tiny_policy


def weights(version: int, count: int = 3) -> EncodedWeights:
    return encode({"w": np.full(count, version, np.float32)}, version)


@pytest.fixture
def store() -> ParameterServer:
    return ParameterServer.Config().build()


@pytest.fixture
def server(store: ParameterServer) -> Iterator[WeightServer]:
    running = WeightServer(store)
    yield running
    running.close()


@pytest.fixture
def client(server: WeightServer) -> WeightClient:
    return WeightClient(server.endpoint)


def raw(endpoint: Endpoint, sent: bytes) -> bytes:
    """All that the server answers to these bytes, when nothing more comes."""
    with socket.create_connection((endpoint.host, endpoint.port), timeout=20) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            return stream.read()


def push_request(endpoint: Endpoint, encoded: EncodedWeights) -> dict:
    text = encoded.manifest.to_json()
    return {"token": endpoint.token, "operation": "push", "manifest": text, "nbytes": len(encoded.buffer)}


def test_what_is_pushed_is_pulled(client: WeightClient, store: ParameterServer):
    params = tiny_params(tiny_policy())
    client.push(encode(params, 0))
    pulled = client.pull(0)
    found = decode(pulled)
    for path in (("embedding", "weight_vd"), ("layers", "attention", "q_dkqh")):
        one, other = found, params
        for key in path:
            one, other = one[key], other[key]
        np.testing.assert_array_equal(one, other)
    assert pulled.manifest == store.pull(0).manifest
    assert (client.latest(), client.oldest()) == (0, 0)


def test_megabytes_arrive_whole(client: WeightClient):
    rng = np.random.default_rng(0)
    big = encode({"w": rng.standard_normal(1 << 21).astype(np.float32)}, 0)
    client.push(big)
    assert client.pull(0).buffer == big.buffer


def test_rewind_travels_too(client: WeightClient, store: ParameterServer):
    for version in range(3):
        client.push(weights(version))
    client.rewind(1)
    assert (store.latest(), client.latest(), client.oldest()) == (1, 1, 0)


def test_an_empty_server_answers(client: WeightClient):
    assert client.latest() == -1
    with pytest.raises(WeightsError, match=r"version 0 not published within 0 s \(held: none\)"):
        client.pull(0)


@pytest.mark.parametrize("token", ["", "wrong", "gänzlich falsch", None])
def test_without_the_token_nothing_is_served(server: WeightServer, store: ParameterServer, token: str):
    store.push(weights(0))
    stranger = WeightClient(dataclasses.replace(server.endpoint, token=token))
    for attempt in (lambda: stranger.pull(0), lambda: stranger.rewind(-1), lambda: stranger.push(weights(1))):
        with pytest.raises(WeightsError, match="wrong token|failed"):
            attempt()
    assert [manifest.version for manifest in store.manifests()] == [0]


def test_a_damaged_upload_is_refused_and_never_visible(server: WeightServer, client: WeightClient):
    good = weights(1)
    buffer = bytearray(good.buffer)
    buffer[0] ^= 1
    with pytest.raises(WeightsError, match="version 1 are damaged"):
        client.push(EncodedWeights(good.manifest, buffer))
    assert client.latest() == -1
    client.push(good)
    assert client.latest() == 1


def test_half_an_upload_is_never_visible(server: WeightServer, client: WeightClient, capsys: pytest.CaptureFixture):
    """The trainer is killed in the middle of a push; its successor pushes the same version."""
    good = weights(1, count=1000)
    line = json.dumps(push_request(server.endpoint, good)).encode() + b"\n"
    for sent in (0, 1, len(good.buffer) - 1):
        raw(server.endpoint, line + bytes(good.buffer)[:sent])
        assert client.latest() == -1
    client.push(good)
    assert client.latest() == 1
    assert "Traceback" not in capsys.readouterr().err  # the death of a peer is nothing to report


def test_the_same_version_twice_is_fine_and_with_other_content_refused(client: WeightClient):
    client.push(weights(1))
    client.push(weights(1))
    with pytest.raises(WeightsError, match="version 1 was published before"):
        client.push(encode({"w": np.zeros(3, np.float32)}, 1))


def test_a_waiting_pull_gets_the_version_when_it_is_published(client: WeightClient, store: ParameterServer):
    found: list[EncodedWeights] = []
    thread = threading.Thread(target=lambda: found.append(client.pull(1, timeout=60)))
    thread.start()
    store.push(weights(0))
    assert client.latest() == 0  # a wait holds up nobody else
    store.push(weights(1))
    thread.join(20)
    np.testing.assert_array_equal(decode(found[0])["w"], np.ones(3, np.float32))


@pytest.mark.parametrize(
    "request_line, expected",
    [
        (b"GET / HTTP/1.1\r\n", "Expecting value"),
        (b"[1, 2]\n", "wrong token"),
        (b"\xff\xfe\n", "codec can't decode"),
        (b"", "Expecting value"),
    ],
)
def test_strangers_get_an_error_and_the_server_lives(
    server: WeightServer, client: WeightClient, request_line: bytes, expected: str
):
    reply = json.loads(raw(server.endpoint, request_line))
    assert expected in reply["error"]
    assert client.latest() == -1


def test_an_unknown_operation_is_named(server: WeightServer):
    line = json.dumps({"token": server.endpoint.token, "operation": "steal"}).encode() + b"\n"
    assert "unknown operation 'steal'" in json.loads(raw(server.endpoint, line))["error"]


def test_a_port_in_use_is_a_clear_error(server: WeightServer):
    taken = ParameterServer.Config(port=server.endpoint.port).build()
    with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{server.endpoint.port}: .*any free port"):
        WeightServer(taken)


def test_a_server_that_is_gone_is_a_clear_error(store: ParameterServer):
    server = WeightServer(store)
    server.close()
    with pytest.raises(WeightsError, match=rf"parameter server at 127.0.0.1:{server.endpoint.port}: latest failed"):
        WeightClient(server.endpoint).latest()


def test_a_client_that_is_given_a_way_to_find_the_server_follows_it(store: ParameterServer):
    """The parameter server's process was killed and started again: it listens on another port."""
    old, new = WeightServer(store, "secret"), WeightServer(store, "secret")
    places = iter([old.endpoint, old.endpoint, new.endpoint])
    client = WeightClient(lambda: next(places))
    store.push(weights(3))
    assert client.latest() == 3
    old.close()
    assert client.latest() == 3
    client.push(weights(4))
    assert store.latest() == 4
    new.close()
