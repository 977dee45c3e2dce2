"""Nobody is served who does not know the token, and nonsense takes neither memory nor others' time."""

import dataclasses
import json
import socket
import struct
import threading
import time

import pytest

from rl.parameter_server.errors import WeightsError
from rl.parameter_server.transport import server as server_module
from rl.parameter_server.transport.client import RpcClient, Unreachable
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.server import ClientLimits, RpcServer
from tests.rl.parameter_server.transport.rpc_bed import Store, connections, say, until


@pytest.mark.parametrize("token", ["", "wrong", "gänzlich falsch"])
def test_without_the_token_nothing_is_served(server: RpcServer, client: RpcClient, store: Store, token: str):
    stranger = RpcClient(dataclasses.replace(server.endpoint, token=token), name="parameter server")
    with pytest.raises(Unreachable, match=r"parameter server 127.0.0.1:\d+: store failed: wrong token"):
        stranger.call("store", {"name": "w"}, [b"bad"])
    client.call("store", {"name": "v"}, [b"good"])
    assert store.put == {"v": b"good"}


def test_a_server_that_does_not_know_the_token_is_given_nothing():
    """An impostor accepts every client; its own proof exposes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    heard = bytearray()

    def impostor() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"axlwire1" + bytes(32))
            sock.recv(64, socket.MSG_WAITALL)
            sock.sendall(b"\1" + bytes(32))
            while more := sock.recv(4096):
                heard.extend(more)

    thread = threading.Thread(target=impostor)
    thread.start()
    client = RpcClient(Endpoint("127.0.0.1", listener.getsockname()[1], "secret"), name="parameter server")
    with pytest.raises(Unreachable, match="the server does not know the token"):
        client.call("store", {"name": "w"}, [b"weights"])
    thread.join(20)
    listener.close()
    assert not heard


def test_the_token_is_not_shown_and_does_not_travel(server: RpcServer, client: RpcClient):
    assert server.endpoint.token not in repr(server.endpoint)
    assert Endpoint(**json.loads(json.dumps(dataclasses.asdict(server.endpoint)))) == server.endpoint


@pytest.mark.parametrize(
    "garbage", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b"\xff" * (1 << 20), b"AXLW" + bytes(60)]
)
def test_strangers_are_sent_away(server: RpcServer, client: RpcClient, garbage: bytes):
    answer = say(server.endpoint, garbage)
    assert len(answer) <= 40 + 33 and not answer[40:].strip(b"\0")
    client.call("echo")
    until(lambda: len(connections()) == 1, "the stranger's thread ends")


def test_a_stranger_cannot_hold_a_connection_by_sending_slowly(store: Store, monkeypatch: pytest.MonkeyPatch):
    """Each byte comes in time; the proof as a whole does not."""
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT", 1.0)
    server = RpcServer(store)
    with socket.create_connection((server.endpoint.host, server.endpoint.port), timeout=20) as stranger:
        stranger.settimeout(0.2)
        began, ended = time.monotonic(), False
        while not ended and time.monotonic() < began + 30:
            try:
                stranger.send(b"x")
                ended = stranger.recv(100) == b""
            except TimeoutError:
                pass
            except OSError:
                ended = True
    until(lambda: not connections(), "the stranger's thread ends")
    server.close()
    assert ended


def test_strangers_that_stay_keep_no_client_out(server: RpcServer, client: RpcClient):
    """Many more silent connections than are let in, all open when the client comes."""
    address = (server.endpoint.host, server.endpoint.port)
    strangers = [socket.create_connection(address, timeout=20) for _ in range(3 * server_module.MAX_UNAUTHENTICATED)]
    client.call("echo")
    until(lambda: len(connections()) <= server_module.MAX_UNAUTHENTICATED + 1, "the oldest are closed")
    for stranger in strangers:
        stranger.close()
    client.call("echo")


@pytest.mark.parametrize(
    "message",
    [
        b"GET / HTTP/1.1\r\n\r\n    ",
        struct.pack("!4sB3xIQ", b"AXLW", 0, 0xFFFFFFFF, 0),  # a header of 4 GB
        struct.pack("!4sB3xIQ", b"AXLW", 0, 4, 0) + b"{{{{",
        struct.pack("!4sB3xIQ", b"AXLW", 0, 2, 0) + b"[]",
        struct.pack("!4sB3xIQ", b"AXLW", 0, 2, 0) + b"{}",
        struct.pack("!4sB3xIQ", b"AXLW", 0, 100_000, 0) + b"[" * 100_000,
        struct.pack("!4sB3xIQ", b"AXLW", 7, 33, 0) + b'{"operation":"echo","fields":{}} ',
        struct.pack("!4sB3xIQ", b"AXLW", 0, 32, 0) + b'{"operation":"echo","fields":[]}',
    ],
)
def test_nonsense_from_within_ends_its_connection_only(server: RpcServer, client: RpcClient, message: bytes):
    assert say(server.endpoint, message, known=True) == b""
    client.call("echo")
    until(lambda: len(connections()) == 1, "its thread ends")


def test_more_bytes_than_allowed_are_refused(store: Store):
    server = RpcServer(store, limits=ClientLimits(nbytes=1 << 20))
    client = RpcClient(server.endpoint, name="parameter server", max_nbytes=1 << 10)
    client.call("ignore", {}, [bytes(1 << 20)])
    with pytest.raises(WeightsError, match="store: refused: 8,388,608 bytes announced, at most 1,048,576 are taken"):
        client.call("store", {"name": "w"}, [bytes(8 << 20)])
    with pytest.raises(Unreachable, match=r"grow failed: refused: a reply of 1,025 bytes \(at most 1,024\)"):
        client.call("grow", {"nbytes": 1025})
    assert client.call("grow", {"nbytes": 1024})[1] == bytes(1024)
    assert not store.put
    client.close()
    server.close()


def test_announced_bytes_that_do_not_come_take_no_memory(server: RpcServer, client: RpcClient):
    """`Body.read` is the handler's choice; the server itself sets nothing aside for what was only announced."""
    header = b'{"operation":"ignore","fields":{}}'
    assert say(server.endpoint, struct.pack("!4sB3xIQ", b"AXLW", 0, len(header), 1 << 35), header, known=True) == b""
    client.call("echo")
