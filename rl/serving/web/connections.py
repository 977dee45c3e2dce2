"""Limits on connections, so that clients that send nothing, or read nothing, keep nobody out.

Every connection takes a file descriptor, and a process without free descriptors can neither accept nor compile. So
their number is bounded below the process's limit. When it is reached, the connection that has waited longest for its
client to send a request is closed for a new one. If all are being answered, a few more may ask for the server's
health, and get 503 for everything else.
"""

import asyncio
import contextlib
import os
import resource
import socket
from typing import Any, cast, override

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl.serving.errors import ApiError
from rl.serving.web.http import refusal

_RECEIVE = 30.0  # seconds from the opening of a connection, or from the last answer, to the end of a request
_SEND = 60.0  # seconds that a client may read nothing of an answer
_OTHER = 192  # descriptors for compilers, weights, logs and the connections in `_EXTRA`
_EXTRA = 64  # connections beyond the limit, for health checks
_AT_ONCE = 16  # connections accepted before their protocols run
_QUEUE = 1024  # connections that the kernel holds until they are accepted
_ALWAYS = ("/health", "/ping", "/metrics")
_BUSY = ApiError(503, "all connections of the server are in use", code="too_many_connections", retry_after=1)
_REFUSED = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"


def connections_allowed(most: int) -> int:
    """Raise the process's limit of file descriptors as far as `most` connections need; return how many it allows."""
    wanted = most + _OTHER + _open_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):  # some systems have a lower limit that is not told
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(raised, soft), hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(1, min(most, soft - _OTHER - _open_descriptors()))
    return most


def _open_descriptors() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return 64


class Connections:
    """The connections of one server. `protocol` makes one, as uvicorn asks for it."""

    def __init__(self, app: ASGIApp, most: int):
        self.app, self.most = app, most
        self.all: set[HttpConnection] = set()
        self.receiving: dict[HttpConnection, None] = {}  # connections without a whole request, the oldest first

    def protocol(self, **given: Any) -> "HttpConnection":
        """Return the protocol of a new connection."""
        return HttpConnection(self, **given)


class ConnectionServer(uvicorn.Server):
    """A web server that accepts few connections at a time: `Connections` closes others before descriptors run out."""

    def __init__(self, connections: Connections, **options: Any):
        """`options`: see uvicorn.Config."""
        http = cast(type[asyncio.Protocol], connections.protocol)
        super().__init__(uvicorn.Config(connections.app, http=http, backlog=_AT_ONCE, **options))

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_QUEUE)


class HttpConnection(H11Protocol):
    """HTTP/1.1 by h11, with limits of time for what the client sends and reads."""

    def __init__(self, owner: Connections, **given: Any):
        super().__init__(**given)
        self._owner = owner
        self._timer: asyncio.TimerHandle | None = None  # timer of the client's next step

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        owner = self._owner
        if len(owner.all) >= owner.most and owner.receiving:
            next(iter(owner.receiving)).end()
        if len(owner.all) >= owner.most + _EXTRA:
            transport.write(_REFUSED)
            return transport.close()
        if len(owner.all) >= owner.most:
            self.app: Any = self._only_health
        owner.all.add(self)
        self._wait_for_request()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._wait_for_nothing()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._wait_for_request()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer(_SEND)

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_timer(_RECEIVE if self in self._owner.receiving else None)

    def end(self) -> None:
        """Close the connection at once."""
        self._forget()
        self.transport.abort()

    def _wait_for_request(self) -> None:
        self._owner.receiving.pop(self, None)
        self._owner.receiving[self] = None
        self._set_timer(_RECEIVE)

    def _wait_for_nothing(self) -> None:
        if self._owner.receiving.pop(self, self) is None:
            self._set_timer(None)

    def _forget(self) -> None:
        self._owner.all.discard(self)
        self._owner.receiving.pop(self, None)
        self._set_timer(None)

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.end)

    async def _only_health(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._owner.app if scope.get("path") in _ALWAYS else refusal(_BUSY)
        await answer(scope, receive, send)
