"""A depot of KV pages: a worker that must go leaves them, and the one that goes on with its rollouts takes them."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rl.parameter_server.transport.client import RpcClient
from rl.parameter_server.transport.server import Body

_LIMIT = 1 << 30  # bytes held; the oldest pages make room
_SECONDS = 10.0  # limit for a server to take or give the pages of one sequence


class PageDepot(Protocol):
    """Pages of sequences, as bytes, by names that only their tokens give."""

    def put(self, name: str, data: bytes) -> None:
        """Keep pages, for as long as there is room."""
        ...

    def take(self, name: str) -> bytes | None:
        """Remove pages and return them; None: they are not here."""
        ...


class LocalPageDepot:
    """The depot of this process."""

    def __init__(self, limit: int = _LIMIT):
        self._limit, self._held = limit, 0
        self._pages: OrderedDict[str, bytes] = OrderedDict()  # oldest first
        self._lock = threading.Lock()

    def put(self, name: str, data: bytes) -> None:
        """Keep pages, and drop the oldest ones for which there is no room."""
        with self._lock:
            self._held += len(data) - len(self._pages.pop(name, b""))
            self._pages[name] = data
            while self._held > self._limit:
                self._held -= len(self._pages.popitem(last=False)[1])

    def take(self, name: str) -> bytes | None:
        """Remove pages and return them; None: they are not here."""
        with self._lock:
            if (data := self._pages.pop(name, None)) is not None:
                self._held -= len(data)
            return data

    def answer(self, operation: str, fields: Mapping[str, Any], body: Body) -> tuple[dict[str, Any], Sequence[Any]]:
        """Answer a request of a `RemotePageDepot`."""
        if operation == "put_pages":
            self.put(fields["name"], bytes(body.read()))
            return {}, ()
        data = self.take(fields["name"])
        return {"found": data is not None}, () if data is None else [memoryview(data)]


class RemotePageDepot:
    """The depot of another process."""

    def __init__(self, client: RpcClient):
        self._client = client

    def put(self, name: str, data: bytes) -> None:
        """Keep pages there (WeightsError: it cannot be reached)."""
        self._client.call("put_pages", {"name": name}, [memoryview(data)], timeout=_SECONDS)

    def take(self, name: str) -> bytes | None:
        """Remove pages there and return them; None: they are not there (WeightsError: it cannot be reached)."""
        reply, data = self._client.call("take_pages", {"name": name}, timeout=_SECONDS)
        return bytes(data or b"") if reply["found"] else None


OPERATIONS = ("put_pages", "take_pages")
