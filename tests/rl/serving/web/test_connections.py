"""Clients that send nothing, send slowly or do not read keep no other out."""

import http.client
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rl.serving.web import connections
from tests.rl.serving.running import MODEL, Running, eventually, running

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connect(url: str, text: bytes = b"") -> socket.socket:
    """Open a connection, send a text and nothing more."""
    address = urlsplit(url)
    client = socket.create_connection((address.hostname, address.port), timeout=10)
    client.sendall(text)
    return client


def is_closed(client: socket.socket) -> bool:
    """Return True if the server has closed a connection on which it has sent nothing."""
    client.settimeout(0.05)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def status(client: socket.socket) -> int:
    """Read the status of an answer."""
    answer = http.client.HTTPResponse(client)
    answer.begin()
    answer.read()
    return answer.status


def completion(model: str) -> bytes:
    """A request for four tokens."""
    body = b'{"model": "%s", "prompt": "hello", "max_tokens": 4}' % model.encode()
    head = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return b"POST /v1/completions HTTP/1.1\r\n" + head + body


@pytest.fixture
def few() -> Iterator[Running]:
    with running(max_connections=8) as served:
        yield served


def test_silent_connections_make_room(few: Running) -> None:
    with ExitStack() as stack:
        silent = [
            stack.enter_context(connect(few.url, text)) for text in (b"", b"GET / HT", b"POST /x HTTP/1.1\r\n") * 20
        ]
        for _ in range(3):
            began = time.monotonic()
            assert few.ask("GET", "/health")[0] == 200
            assert few.post("/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": 1})[0] == 200
            assert time.monotonic() - began < 10
        assert all(is_closed(client) for client in silent[:50])
        assert not is_closed(silent[-1])


def test_what_is_being_answered_is_not_closed_for_another(few: Running) -> None:
    few.server.engine.pause().result(10)
    with ExitStack() as stack:
        asking = [stack.enter_context(connect(few.url, completion(MODEL))) for _ in range(8)]
        assert eventually(lambda: len(few.server.app._jobs) == 8)
        assert few.ask("GET", "/health")[0] == 200
        refused = few.post("/v1/completions", {"model": MODEL, "prompt": "hello"})
        assert (refused[0], refused[1]["error"]["code"], refused[2]["retry-after"]) == (
            503,
            "too_many_connections",
            "1",
        )
        few.server.engine.resume().result(10)
        assert [status(client) for client in asking] == [200] * 8
    assert eventually(lambda: few.post("/v1/completions", {"model": MODEL, "prompt": "hello"})[0] == 200)


def test_a_client_has_limited_time_for_a_request(few: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_RECEIVE", 0.3)
    slow = [b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"]
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(few.url, text)) for text in slow]
        late = stack.enter_context(connect(few.url, HEALTH))
        assert status(late) == 200
        time.sleep(0.2)
        late.sendall(HEALTH)  # each answer starts it again
        assert status(late) == 200
        time.sleep(0.4)
        for client in [*clients, late]:
            client.settimeout(5)
            try:
                while client.recv(65536):
                    pass
            except ConnectionResetError:
                pass


def test_a_client_that_reads_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_SEND", 0.3)
    with running() as served:
        many = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
        with connect(served.url) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(0.5)
            with pytest.raises((TimeoutError, ConnectionError)):
                while True:
                    client.sendall(many)
            assert eventually(lambda: not served.server._web._server.server_state.connections, 10)


@pytest.mark.full
def test_three_thousand_silent_connections_at_a_limit_of_1024_descriptors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    command = ["bash", "-c", 'ulimit -n 1024; exec "$@"', "-", sys.executable, "-m", "axlearn_like", "serve", "demo"]
    command += ["--random-weights", "--port", "0", "--warmup", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("serving"))
        url = line.split(" at ")[1].strip().removesuffix("/v1")
        for _ in range(3000):
            stack.enter_context(connect(url))
        waits = []
        for _ in range(20):
            began = time.monotonic()
            with connect(url, HEALTH) as client:
                assert status(client) == 200
            waits.append(time.monotonic() - began)
        assert max(waits) < 1.0
        with connect(url, completion("demo")) as client:
            client.settimeout(120)
            assert status(client) == 200
        assert process.poll() is None
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
