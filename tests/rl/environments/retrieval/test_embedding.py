"""Embeddings by a function and by an endpoint: a real server of the loopback interface, and what it may get wrong."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from mesh import UserError
from rl.environments.retrieval.embedding import EndpointEmbedder, FunctionEmbedder


def letters(texts: list[str], scale: float = 1.0) -> Any:
    return [[scale * (1 + text.count(letter)) for letter in "abcd"] for text in texts]


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[dict[str, Any]] = []
        self.failures = 0
        self.spoil = False


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
        rows = [{"index": n, "embedding": row} for n, row in enumerate(letters(body["input"]))][::-1]
        self.server.failures -= 1
        self.send_response(503 if self.server.failures >= 0 else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": rows[1:] if self.server.spoil else rows}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.mark.numerics
def test_an_endpoint_is_asked_in_batches_and_again_after_a_failure(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EMBED_KEY", "k")
    url = f"http://127.0.0.1:{server.server_port}/v1"
    cfg = EndpointEmbedder.Config(url=url, model="m", key_variable="EMBED_KEY", batch=2, pause_s=0.01)
    server.failures = 1
    made = cfg.build().embed(["ab", "ccc", "d"])
    expected = np.asarray(letters(["ab", "ccc", "d"]))
    np.testing.assert_allclose(made, expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-6)
    assert [one["input"] for one in server.seen] == [["ab", "ccc"], ["ab", "ccc"], ["d"]]
    assert {(one["path"], one["key"], one["model"]) for one in server.seen} == {("/v1/embeddings", "Bearer k", "m")}
    server.spoil = True
    with pytest.raises(RuntimeError, match=r"no reply after 3 attempts.*expected 0 to 0"):
        cfg.build().embed(["a"])
    assert cfg.reaches() == (f"EMBED_KEY@http://127.0.0.1:{server.server_port}",)
    monkeypatch.delenv("EMBED_KEY")
    with pytest.raises(UserError, match="EndpointEmbedder: the environment variable EMBED_KEY is not set"):
        cfg.build()
    with pytest.raises(ConfigError, match="url"):
        cfg.clone(url="ftp://x").build()


def broken(texts: list[str], kind: str) -> Any:
    made = np.ones((len(texts), 3))
    if kind == "nan":
        made[-1, 0] = np.nan
    return {"nan": made, "zero": 0 * made, "short": made[1:], "flat": made[0], "words": texts}[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nan", "vector of 'b' has no finite length"),
        ("zero", "vector of 'a' has no finite length"),
        ("short", "shape .1, 3. for 2 texts"),
        ("flat", "shape .3,. for 2"),
        ("words", "no array of numbers"),
    ],
)
def test_vectors_that_are_none_are_refused(kind: str, message: str):
    with pytest.raises(UserError, match=f"FunctionEmbedder: .*{message}"):
        FunctionEmbedder.Config(function=broken, arguments={"kind": kind}).build().embed(["a", "b"])
