"""Requests of strangers to a running `axl serve`: after each it answers its health check, and a completion."""

import errno
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from urllib.parse import urlsplit

import psutil

from tests.attacks.attack import Attack
from tests.rl.serving.web.test_connections import HEALTH, connect, status
from tests.tools.commands.test_serve import TINY, Served, serving

_HEALTH_S, _MEMORY = 1.0, 200 << 20  # health check after an attack, on an idle machine; growth of memory
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
_KEY = b"Authorization: Bearer secret\r\n"
_SILENT = (b"", b"GET / HT", _POST + b"Content-Length: 99\r\n\r\n{")


class Place:
    """A running server, its address, and its memory before an attack."""

    def __init__(self, served: Served):
        self.served, self.url = served, str(served.client.base_url).removesuffix("/v1/")
        self.model = served.client.models.list().data[0].id
        self.memory = 1 << 40  # no bound yet: what most requests do not need is imported first
        self.ask()
        _fields(self, guided_choice=["a", "b"])

    def resident(self) -> int:
        """Return the resident bytes of the server and of its processes."""
        parent = psutil.Process(self.served.process.pid)
        return sum(one.memory_info().rss for one in (parent, *parent.children(recursive=True)) if one.is_running())

    def ask(self) -> None:
        """Ask for two tokens, as the official client does."""
        answer = self.served.client.completions.create(model=self.model, prompt="a", max_tokens=2)
        assert answer.usage is not None and answer.usage.completion_tokens >= 1

    def check(self) -> str:
        """Expect that it answers; returns what was seen."""
        assert self.served.process.poll() is None, "the server has ended"
        began = time.monotonic()
        with connect(self.url, HEALTH) as client:
            assert status(client) == 200
        waited = time.monotonic() - began
        assert waited < _HEALTH_S + 2 * os.getloadavg()[0] / (os.cpu_count() or 1), f"health after {waited:.2f} s"
        self.ask()
        before, self.memory = self.memory, self.resident()
        grown = self.memory - before
        assert grown < _MEMORY, f"{grown >> 20} MB more memory"
        return f"health in {1000 * waited:.0f} ms"


@contextmanager
def place() -> Iterator[Place]:
    """Start a server of a tiny policy, at a limit of 1,024 descriptors."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with serving(TINY, "--random-weights") as served:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
            yield Place(served)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _raw(text: bytes, place: Place, *, ends: bool = True) -> str:
    """Send bytes, perhaps as the last ones, and read what comes; it must come, or the connection end."""
    address = urlsplit(place.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as client:
        try:
            client.sendall(text)
            if ends:
                client.shutdown(socket.SHUT_WR)
            said = client.recv(64)
        except OSError as error:
            if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                raise
            said = b"closed"
    return f"{said[9:12].decode(errors='replace') if said.startswith(b'HTTP') else 'closed'}, {place.check()}"


def _body(body: bytes, place: Place) -> str:
    head = b"%sContent-Length: %d\r\nContent-Type: application/json\r\n\r\n" % (_POST + _KEY, len(body))
    return _raw(head + body, place, ends=False)


def _fields(place: Place, **fields: object) -> str:
    return _body(json.dumps({"model": place.model, "prompt": "a", "max_tokens": 2, **fields}).encode(), place)


def _silent(count: int, place: Place) -> str:
    with ExitStack() as stack:
        for number in range(count):
            stack.enter_context(connect(place.url, _SILENT[number % len(_SILENT)]))
        return place.check()


def _no_key(place: Place) -> str:
    found = subprocess.run(
        ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{place.url}/v1/models"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == "401", found
    return f"401, {place.check()}"


def _rebound(place: Place) -> str:
    """Ask as a page of another host does, whose name was made to lead here."""
    head = _POST.replace(b"localhost", b"evil.example") + b"Origin: http://evil.example\r\n" + _KEY
    said = _raw(head + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}", place)
    assert said[:2] == "40", said
    return said


_BODIES = {
    "a body nested 100,000 times": b"[" * 100_000,
    "a number of 5,000 digits": b'{"n": ' + b"9" * 5000 + b"}",
    "a body that is no text": b"\xff\xfe" * 1000,
    "a body of 40 MB": b'{"prompt": "' + b"a" * (40 << 20) + b'"}',
}
_FIELDS: dict[str, dict[str, object]] = {
    "a schema of 900 levels": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": json.loads('{"items":' * 900 + "{}" + "}" * 900)},
        }
    },
    "an expression without end": {"guided_regex": "(a+)+" * 200 + "$"},
    "a million samples": {"n": 10**6},
    "100,000 stop texts": {"stop": ["x" * 3] * 100_000},
    "biases of 200,000 tokens": {"logit_bias": {str(i): 1 for i in range(200_000)}},
    "an infinite temperature": {"temperature": 1e400},
}
_HEADS = {
    "a request of garbage": bytes(range(256)) * 40,
    "a header of 10 MB": b"GET / HTTP/1.1\r\nX: " + b"a" * (10 << 20),
    "100,000 headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n",
    "two lengths": _POST + b"Content-Length: 1\r\nContent-Length: 9\r\n\r\n{",
    "a negative length": _POST + b"Content-Length: -5\r\n\r\n",
    "a chunk of 2**70 bytes": _POST + _KEY + b"Transfer-Encoding: chunked\r\n\r\n400000000000000000\r\n",
    "a path out of the server": b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "10,000 requests at once": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000,
}
_HOLDS = "it answers others; 200 MB more at most"
ATTACKS = (
    *(Attack(f"`axl serve`: {name}", "a request", _HOLDS, partial(_raw, text), True) for name, text in _HEADS.items()),
    *(
        Attack(f"`axl serve`: {name}", "a request", _HOLDS, partial(_body, text), True)
        for name, text in _BODIES.items()
    ),
    *(
        Attack(f"`axl serve`: {name}", "a request with a key", _HOLDS, partial(_fields, **fields), True)
        for name, fields in _FIELDS.items()
    ),
    Attack("`axl serve`: no key", "a request without it", "it is refused", _no_key, True),
    Attack("`axl serve`: a page of another host", "a request of a browser", "it is refused", _rebound, True),
    Attack("`axl serve`: 300 silent connections", "nothing, or half a request", _HOLDS, partial(_silent, 300), True),
    Attack(
        "`axl serve`: 3,000 silent connections",
        "the same, at a limit of 1,024 descriptors",
        _HOLDS,
        partial(_silent, 3000),
    ),
)
