"""A service on a port of this machine, and clients of it."""

import http.client
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tinker

from axlearn_like.tokenizers.protocol import Tokenizer
from rl.serving.server import listen, url_of
from rl.serving.service.messages import BaseFacts
from rl.serving.service.service import AdapterService
from rl.serving.service.wire.server import ServiceServer
from tests.rl.serving.service.wire.numbers import BASE, number_service

KEYS = {"alice": "tml-alice", "bob": "tml-bob"}


class Running:
    """A running service, and clients of it."""

    def __init__(self, url: str, service: AdapterService, folder: Path):
        self.url, self.service, self.folder = url, service, folder
        self._clients: list[tinker.ServiceClient] = []

    def client(self, tenant: str = "alice") -> tinker.ServiceClient:
        """Return the official client, with a session of its own."""
        self._clients.append(tinker.ServiceClient(base_url=self.url, api_key=KEYS[tenant]))
        return self._clients[-1]

    def close(self) -> None:
        """End the clients' heartbeats; their sessions just fall silent."""
        for client in self._clients:
            client.holder.close()

    def ask(self, method: str, path: str, body: Any = None, tenant: str | None = "alice", **headers: str) -> Any:
        """Return (status, JSON) of a bare request; `body` is JSON-able, or bytes as they are."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        raw = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
        key = {} if tenant is None else {"X-API-Key": KEYS.get(tenant, tenant)}
        try:
            connection.request(method, f"/api/v1/{path}", raw, {**key, **headers})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if answer.headers.get_content_subtype() == "json" else text
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, tenant: str | None = "alice", **headers: str) -> Any:
        """Return (status, JSON) of a bare POST."""
        return self.ask("POST", path, body, tenant, **headers)


@contextmanager
def running(
    service: AdapterService, tokenizer: Tokenizer | None = None, folder: Path = Path(), **changes: Any
) -> Iterator[Running]:
    """Serve until the end of the block; `changes` are fields of the server's config."""
    cfg = ServiceServer.Config(**{"grace": 0.2, **changes})
    server = cfg.build(service=service, keys=KEYS, tokenizer=tokenizer, limits=(24, 24))
    with listen("127.0.0.1", 0) as listener:
        server.start(listener)
        try:
            yield (served := Running(url_of(listener), service, folder))
            served.close()
        finally:
            server.stop()


@contextmanager
def running_numbers(
    folder: Path | None = None, base: BaseFacts = BASE, tokenizer: Tokenizer | None = None, **changes: Any
) -> Iterator[Running]:
    """Serve models of one number each, on a folder of their own if none is given."""
    with tempfile.TemporaryDirectory() as own:
        used = folder or Path(own)
        with running(number_service(used, base), tokenizer, used, **changes) as served:
            yield served


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait for a condition; returns whether it came."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()
