"""Long use, with clients that leave at any moment: everything that a request holds is given back."""

import json
import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rl.serving.server import Server
from tests.rl.serving.running import MODEL, Running, eventually, make_engine, running

WORDS = ("hello", "hell", "low", "one two", "x", "")
BAD = ({"n": 0}, {"max_tokens": "x"}, {"model": "other"}, {"prompt": "x" * 999}, {"temperature": -1})


def body(rng: random.Random) -> dict[str, object]:
    """Make a request: completions of different kinds, and some that are refused."""
    found: dict[str, object] = {"model": MODEL, "prompt": rng.choice(WORDS), "n": rng.randint(1, 4)}
    found |= {"max_tokens": rng.randint(1, 18), "stream": rng.random() < 0.5, "seed": rng.randrange(99)}
    if rng.random() < 0.2:
        found |= {"deadline": rng.choice([1e-6, 0.05])}
    if rng.random() < 0.3:
        found |= {"stop": ["e"], "repetition_penalty": 1.2}
    return found | (rng.choice(BAD) if rng.random() < 0.1 else {})


def use(url: str, seed: int) -> None:
    """Send a request, and read its answer whole, in part or not at all."""
    rng = random.Random(seed)
    sent = json.dumps(body(rng)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n"
    raw = f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + sent
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as client:
        client.sendall(raw[: rng.randrange(len(raw))] if (cut := rng.random() < 0.1) else raw)
        if (patience := rng.random()) < 0.3:
            return  # gone without an answer
        client.settimeout(0.02 if patience < 0.6 else 1 if cut else 60)  # a request cut short gets no answer
        try:
            while client.recv(4096):
                pass
        except (TimeoutError, ConnectionError):
            pass


def held(server: Server) -> dict[str, int]:
    """Count what the process and the server hold."""
    stats = server.engine.stats
    state = server._web._server.server_state
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "requests": len(server.app._jobs) + len(server.engine._running) + len(server.engine._outbox),
        "sequences": int(stats["running"] + stats["waiting"] + stats["suspended"]),
        "pages of requests": int(stats["pages_used"] - stats["prefix_cache_pages"]),
        "connections": len(state.connections) + len(state.tasks),
    }


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, str]:
    """Return what is more than before, by name."""
    return {name: f"{before[name]} -> {count}" for name, count in after.items() if count > before[name]}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are counted in /proc")
@pytest.mark.parametrize("requests", [80, pytest.param(5000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_nothing_is_left_of_requests_and_of_clients_that_leave(requests: int, caplog: pytest.LogCaptureFixture) -> None:
    with running(make_engine(max_num_seqs=4, pages=64), max_queue=8) as served:
        expected = answer(served)
        assert eventually(
            lambda: not any(held(served.server)[name] for name in ("connections", "requests", "sequences"))
        )
        before = held(served.server)
        with ThreadPoolExecutor(12) as clients:
            for _ in clients.map(use, [served.url] * requests, range(requests)):
                pass
        # Never equality: threads that an earlier test of this process left may end during this one.
        assert eventually(lambda: not grown(before, held(served.server))), grown(before, held(served.server))
        assert answer(served) == expected
        assert served.server.alive
        assert not [
            r for r in caplog.records if r.name != "asyncio" and not r.name.startswith("tinker")
        ]  # no traceback for a client that left


def answer(served: Running) -> object:
    status, found, _ = served.post("/v1/completions", {"model": MODEL, "prompt": "hello", "n": 4, "seed": 1})
    assert status == 200
    return found["choices"]
