"""Beginning and end of a server."""

import socket
import threading
import time
from typing import Any

import openai
import pytest

from mesh import UserError
from rl.serving.server import Server, listen, url_of
from tests.rl.serving.running import MODEL, TOKENIZER, Running, eventually, make_engine, running


def ask_in_background(served: Running, **fields: Any) -> tuple[threading.Thread, list[Any]]:
    """Send a request from a thread; the answer or the error is appended to the list."""
    got: list[Any] = []

    def ask() -> None:
        try:
            got.append(served.client().completions.create(model=MODEL, prompt="hello", **fields))
        except openai.OpenAIError as error:
            got.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert eventually(lambda: len(served.server.app._jobs) > 0)
    return thread, got


def test_requests_under_way_are_answered_before_the_end() -> None:
    with running(grace=60.0) as served:
        served.server.engine.pause().result(10)
        thread, got = ask_in_background(served)
        stopper = threading.Thread(target=served.server.stop)
        stopper.start()
        assert eventually(lambda: refuses(served.url))
        served.server.engine.resume()
        thread.join(60)
        stopper.join(60)
        assert got[0].choices
        assert not served.server.alive


def test_after_the_grace_requests_are_told_that_it_is_over() -> None:
    with running(grace=0.2) as served:
        served.server.engine.pause().result(10)
        thread, got = ask_in_background(served)
        began = time.monotonic()
        served.server.stop()
        assert time.monotonic() - began >= 0.2
        thread.join(60)
        assert isinstance(got[0], openai.InternalServerError) and got[0].status_code == 503
        assert "shutting down" in got[0].message


def refuses(url: str) -> bool:
    """Return whether the port no longer accepts connections."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def test_a_server_that_was_never_started_can_be_stopped() -> None:
    server = Server.Config().build(engine=make_engine(), tokenizer=TOKENIZER, model=MODEL)
    assert not server.alive
    server.wait(lambda: False)
    server.stop()


def test_an_address_in_use_is_refused() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{port} \(--host, --port\): .*--port 0"):
            listen("127.0.0.1", port)
        assert url_of(first) == f"http://127.0.0.1:{port}"


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(UserError, match="cannot listen on no.such.host.invalid:1"):
        listen("no.such.host.invalid", 1)


@pytest.mark.parametrize("field", ["max_queue", "max_samples", "max_body", "deadline", "grace"])
def test_a_size_that_allows_nothing_is_refused(field: str) -> None:
    with pytest.raises(UserError, match=rf"Server\.{field}: expected .*, got -1"):
        Server.Config().set(**{field: -1}).build(engine=make_engine(), tokenizer=TOKENIZER, model=MODEL)
