"""RPC peers that die, hang or restart: no wait is endless, and no other peer is affected."""

import dataclasses
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mesh import UserError
from rl.parameter_server.transport.client import RpcClient, Unreachable
from rl.parameter_server.transport.connection import Connection
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.handshake import client_handshake
from rl.parameter_server.transport.server import ClientLimits, RpcServer
from tests.rl.parameter_server.transport.rpc_bed import Store, connections, say, until

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("arrives", [0, 1, 999])
def test_half_a_request_is_none(server: RpcServer, client: RpcClient, store: Store, arrives: int):
    header = b'{"operation":"store","fields":{"name":"w"}}'
    frame = struct.pack("!4sB3xIQ", b"AXLW", 0, len(header), 1000)
    assert say(server.endpoint, frame, header, bytes(arrives), known=True) == b""
    assert say(server.endpoint, (frame + header)[:arrives], known=True) == b""
    client.call("store", {"name": "v"}, [b"good"])
    assert store.put == {"v": b"good"}


def test_a_client_that_dies_in_the_middle_of_an_answer_disturbs_nobody(
    server: RpcServer, client: RpcClient, caplog: pytest.LogCaptureFixture
):
    header = b'{"operation":"grow","fields":{"nbytes":67108864}}'
    request = struct.pack("!4sB3xIQ", b"AXLW", 0, len(header), 0) + header
    sock = socket.create_connection((server.endpoint.host, server.endpoint.port), timeout=20)
    client_handshake(Connection(sock, 20.0), server.endpoint.token)
    sock.sendall(request)
    assert sock.recv(100_000)
    sock.close()  # with bytes unread: a reset
    until(lambda: not connections(), "its thread ends")
    client.call("echo")
    assert not caplog.records


def test_a_port_in_use_is_a_clear_error(server: RpcServer, store: Store):
    with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{server.endpoint.port}: .*any free port"):
        RpcServer(store, port=server.endpoint.port)


def test_a_server_that_is_gone_is_a_clear_error(store: Store):
    server = RpcServer(store)
    client = RpcClient(server.endpoint, name="parameter server")
    client.call("echo")
    server.close()
    until(lambda: not connections(), "close ends the threads")
    with pytest.raises(Unreachable, match=rf"server 127.0.0.1:{server.endpoint.port}: echo failed: .*refused"):
        client.call("echo")


def test_close_ends_who_waits_and_who_is_idle(server: RpcServer, client: RpcClient, store: Store):
    client.call("echo")
    failed: list[Exception] = []

    def ask() -> None:
        try:
            client.call("wait", timeout=60)
        except Unreachable as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: bool(client._pool._busy), "the call is under way")
    client.close()
    thread.join(20)
    assert len(failed) == 1
    with pytest.raises(Unreachable, match="the client is closed"):
        client.call("echo")


def test_a_server_on_the_same_port_again_is_found_by_the_same_client(store: Store):
    """A restarted server's idle connections are dead, which must not fail the call."""
    server = RpcServer(store)
    client = RpcClient(server.endpoint, name="parameter server")
    client.call("echo")
    server.close()
    again = RpcServer(store, port=server.endpoint.port, token=server.endpoint.token)
    client.call("store", {"name": "w"}, [bytes(1 << 20)])
    assert store.put["w"] == bytes(1 << 20)
    client.close()
    again.close()


def test_a_client_that_is_given_a_way_to_find_the_server_follows_it(store: Store):
    old, new, alien = RpcServer(store, token="secret"), RpcServer(store, token="secret"), RpcServer(store)
    not_mine = dataclasses.replace(alien.endpoint, token="secret")  # another run's server got the old port

    def nowhere() -> Endpoint:
        raise FileNotFoundError("nobody has said")

    places = iter([lambda: old.endpoint, lambda: old.endpoint, nowhere, lambda: not_mine, lambda: new.endpoint])
    client = RpcClient(lambda: next(places)(), name="parameter server")
    client.call("echo")
    old.close()
    client.call("store", {"name": "w"}, [b"1"])
    assert store.put == {"w": b"1"}
    client.close()
    new.close()
    alien.close()


def test_patience_ends(store: Store):
    server = RpcServer(store)
    server.close()
    client = RpcClient(lambda: server.endpoint, name="parameter server", retry_timeout=0.5)
    with pytest.raises(Unreachable, match=r"parameter server 127.0.0.1:\d+: echo failed: .*refused \(tried \d+ times"):
        client.call("echo")


def test_an_answer_that_does_not_come_is_named(client: RpcClient, store: Store, server: RpcServer):
    hasty = RpcClient(server.endpoint, name="parameter server", connect_timeout=0.2)
    with pytest.raises(Unreachable, match=r"parameter server 127.0.0.1:\d+: wait failed: nothing came for 0.3 s"):
        hasty.call("wait", timeout=0.1)
    hasty.close()


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    code = "from tests.rl.parameter_server.transport.rpc_bed import elsewhere; elsewhere()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as running:
        assert running.stdout is not None
        yield running, Endpoint(**json.loads(running.stdout.readline()))
        running.kill()


def stop(pid: int) -> None:
    """Stop the process, and wait until SIGSTOP has taken effect."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it stops")


def test_a_server_that_is_stopped_is_an_error_that_says_so(process: tuple[subprocess.Popen[str], Endpoint]):
    running, endpoint = process
    client = RpcClient(endpoint, name="parameter server", connect_timeout=0.5)
    data = os.urandom(1 << 20)
    client.call("echo", {}, [data], timeout=30)
    stop(running.pid)
    with pytest.raises(Unreachable, match=r"parameter server 127.0.0.1:\d+: echo failed: nothing came for 0.7 s"):
        client.call("echo", timeout=0.2)  # on a connection that is there
    with pytest.raises(Unreachable, match=r"echo failed: nothing came for 0.5 s"):
        client.call("echo")  # on a new one, which the kernel has accepted
    os.kill(running.pid, signal.SIGCONT)
    assert client.call("echo", {}, [data], timeout=30)[1] == data
    client.close()


def test_a_server_that_stops_taking_bytes_is_an_error_that_says_so(process: tuple[subprocess.Popen[str], Endpoint]):
    running, endpoint = process
    client = RpcClient(endpoint, name="parameter server", connect_timeout=0.5)
    client.call("echo", timeout=30)
    stop(running.pid)
    with pytest.raises(Unreachable, match=r"echo failed: nothing was taken for 0.5 s"):
        client.call("echo", {}, [bytes(64 << 20)])
    client.close()


def test_a_server_that_is_killed_while_one_waits(process: tuple[subprocess.Popen[str], Endpoint]):
    running, endpoint = process
    client = RpcClient(endpoint, name="parameter server")
    client.call("echo")
    threading.Timer(0.2, running.kill).start()
    with pytest.raises(Unreachable, match=r"parameter server 127.0.0.1:\d+: wait failed: .*(closed|reset|refused)"):
        client.call("wait", timeout=60)
    client.close()


def test_a_server_that_is_killed_is_followed(process: tuple[subprocess.Popen[str], Endpoint], server: RpcServer):
    running, endpoint = process
    places = iter([endpoint])
    client = RpcClient(lambda: next(places, server.endpoint), name="parameter server")
    data = os.urandom(3 << 20)
    client.call("echo")
    threading.Timer(0.2, running.kill).start()
    give_up = time.monotonic() + 60
    while running.poll() is None:
        assert hashlib.sha256(client.call("echo", {}, [data])[1] or b"").digest() == hashlib.sha256(data).digest()
        assert time.monotonic() < give_up
    assert client.call("echo", {}, [data])[1] == data
    client.close()


def test_a_client_that_stops_in_the_middle_is_given_up(store: Store):
    server = RpcServer(store, limits=ClientLimits(stall=0.3))
    sock = socket.create_connection((server.endpoint.host, server.endpoint.port), timeout=20)
    client_handshake(Connection(sock, 20.0), server.endpoint.token)
    time.sleep(0.5)
    assert len(connections()) == 1  # idle is not stopped
    sock.sendall(struct.pack("!4sB3xIQ", b"AXLW", 0, 100, 0))
    until(lambda: not connections(), "its thread ends")
    sock.close()
    server.close()


def test_too_many_connections_are_closed(store: Store):
    server = RpcServer(store, limits=ClientLimits(connections=1))
    first, second = (RpcClient(server.endpoint, name="parameter server") for _ in range(2))
    first.call("echo")
    with pytest.raises(Unreachable, match="echo failed: .*(closed|reset)"):
        second.call("echo")
    first.call("echo")
    first.close()
    server.close()


def test_ipv6(store: Store):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    server = RpcServer(store, host="::1")
    assert server.endpoint.address == f"[::1]:{server.endpoint.port}"
    client = RpcClient(server.endpoint, name="parameter server")
    assert client.call("echo", {"a": 1})[0] == {"a": 1}
    client.close()
    server.close()


def test_a_server_that_listens_everywhere_says_where_it_is(store: Store):
    server = RpcServer(store, host="0.0.0.0", advertise="127.0.0.1")
    assert server.endpoint.host == "127.0.0.1"
    RpcClient(server.endpoint, name="parameter server").call("echo")
    server.close()


def test_without_patience_the_next_call_finds_the_server_where_it_is_now(store: Store):
    """A connection that gives up at once must not remember where the server was."""
    old, new = RpcServer(store, token="secret"), RpcServer(store, token="secret")
    places = [old.endpoint, new.endpoint]
    client = RpcClient(lambda: places[0], name="parameter server", retry_timeout=0.0)
    client.call("store", {"name": "w"}, [b"x"])
    old.close()
    del places[0]
    with pytest.raises(Unreachable):
        client.call("store", {"name": "w"}, [b"x"])
    client.call("store", {"name": "w"}, [b"x"])
    new.close()


def test_a_wait_for_an_answer_is_told_each_time_it_has_doubled(store: Store, server: RpcServer):
    told: list[tuple[str, float]] = []

    def on_wait(what: str, seconds: float) -> None:
        told.append((what, seconds))
        if len(told) == 2:
            store.release.set()

    client = RpcClient(server.endpoint, name="parameter server", on_wait=on_wait, warn_after=0.5)
    client.call("echo")
    client.call("wait", timeout=60.0)
    client.close()
    assert [what for what, _ in told] == ["to answer (wait)"] * 2
    assert told[0][1] >= 0.5 and 2 * told[0][1] <= told[1][1] + 0.01  # the clock is read twice


def test_a_repeated_call_is_told_and_the_time_it_asks_for_is_not(store: Store, server: RpcServer):
    told: list[str] = []
    endpoints = [dataclasses.replace(server.endpoint, port=1)] * 4 + [server.endpoint]
    client = RpcClient(
        lambda: endpoints.pop(0), name="parameter server", on_wait=lambda what, _: told.append(what), warn_after=0.1
    )
    client.call("echo", {"timeout": 60.0})
    assert told == []
    client.close()
    endpoints = [dataclasses.replace(server.endpoint, port=1)] * 4 + [server.endpoint]
    client = RpcClient(
        lambda: endpoints.pop(0), name="parameter server", on_wait=lambda what, _: told.append(what), warn_after=0.1
    )
    client.call("echo")
    assert set(told) == {"to answer (echo)"}
    client.close()
