"""The server side of the RPC."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import socket
import threading
import time
from collections.abc import Buffer, Callable, Sequence
from typing import Any

from mesh import UserError
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.transport.buffers import view_of
from rl.parameter_server.transport.connection import (
    ERROR,
    MAX_NBYTES,
    REPLY,
    REQUEST,
    Connection,
    TransportError,
    encode_header,
)
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.handshake import server_handshake
from rl.parameter_server.transport.tls import Tls

HANDSHAKE_TIMEOUT = 10.0  # seconds in which a client must have authenticated, however its bytes trickle in
MAX_UNAUTHENTICATED = 64  # limit; one more closes the oldest: a client takes milliseconds, a stranger stays

Fields = dict[str, Any]
Handle = Callable[[str, Fields, "Body"], tuple[Fields, Sequence[Buffer]] | Fields]


class Body:
    """Bytes that came with a request, to be read at most once, in order."""

    def __init__(self, connection: Connection, nbytes: int):
        self._connection, self._left = connection, nbytes
        self.nbytes = nbytes  # bytes of the whole body

    def read_into(self, *memory: Buffer) -> None:
        """Fill these writable buffers, one after the other, with the next bytes. ValueError if fewer are left."""
        views = [view_of(one) for one in memory]
        asked = sum(view.nbytes for view in views)
        if asked > self._left:
            raise ValueError(f"{asked:,} bytes asked for, {self._left:,} of {self.nbytes:,} are left")
        self._connection.read_into(views)
        self._left -= asked

    def read(self) -> bytearray:
        """Return the remaining bytes."""
        data = bytearray(self._left)
        self.read_into(data)
        return data

    def drain(self) -> None:
        """Discard the remaining bytes."""
        self._connection.drain(self._left)
        self._left = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ClientLimits:
    """ClientLimits of a server."""

    nbytes: int = MAX_NBYTES  # requests that announce more are refused
    stall: float = 120.0  # seconds that a client may make no progress in the middle of a request or a reply
    connections: int = 1024  # connections of authenticated clients; further ones are closed


class RpcServer:
    """Server that answers requests by `handle`, with a thread per connection.

    Exceptions of `handle` are sent to the caller: a WeightsError as itself, all others as a WeightsError. Operations
    should be idempotent: a client whose connection broke repeats its request.

    Args:
        handle: called by many threads concurrently. The buffers that it returns must not change until they are sent.
        host: address to listen on, IPv4 or IPv6.
        port: 0 for any free one.
        token: what clients must know; None: a random one.
        tls: certificate; None: no TLS.
        advertise: host of `endpoint` where it differs from `host`, e.g. when listening on 0.0.0.0.
        limits: limits of what clients may do.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: Tls | None = None,
        advertise: str | None = None,
        limits: ClientLimits = ClientLimits(),
    ):
        self._handle = handle
        self._context = tls.server_context if tls else None
        self._limits = limits
        self._lock = threading.Lock()
        self._serving: dict[threading.Thread, Connection] = {}  # authenticated
        self._arriving: dict[threading.Thread, tuple[float, socket.socket]] = {}  # deadlines, oldest first
        self._closed = False
        self._listener = _listen(host, port)
        token = token or secrets.token_hex(16)
        authority = tls.authority if tls else None
        self.endpoint = Endpoint(advertise or host, self._listener.getsockname()[1], token, authority)
        self._acceptor = threading.Thread(target=self._accept, name="weights server", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Close all connections and end the threads; one that is in `handle` ends when that returns."""
        with self._lock:
            self._closed = True
            serving, arriving = dict(self._serving), dict(self._arriving)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        for connection in serving.values():
            connection.abort()
        for _, sock in arriving.values():
            _shut(sock)
        give_up = time.monotonic() + 2.0
        for thread in (self._acceptor, *serving, *arriving):
            if thread is not threading.current_thread():
                thread.join(max(give_up - time.monotonic(), 0.0))

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                self._shut_overdue()
                continue
            except OSError:  # closed; or no file descriptors for now
                time.sleep(0.0 if self._closed else 0.1)
                continue
            self._shut_overdue()
            thread = threading.Thread(target=self._serve, args=(sock,), name="weights connection", daemon=True)
            with self._lock:
                if self._closed:
                    return sock.close()
                self._arriving[thread] = (time.monotonic() + HANDSHAKE_TIMEOUT, sock)
            thread.start()

    def _shut_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            surplus = len(self._arriving) - MAX_UNAUTHENTICATED + 1
            for number, (deadline, sock) in enumerate(self._arriving.values()):
                if now > deadline or number < surplus:
                    _shut(sock)

    def _serve(self, sock: socket.socket) -> None:
        connection: Connection | None = None
        try:
            connection = self._authenticate(sock)
            while not self._closed and self._answer_one(connection):
                pass
        except (TransportError, OSError):
            pass  # the client is gone or unauthenticated: nobody to report to
        finally:
            with self._lock:
                self._arriving.pop(threading.current_thread(), None)
                self._serving.pop(threading.current_thread(), None)
            if connection:
                connection.close()
            sock.close()

    def _authenticate(self, sock: socket.socket) -> Connection:
        """Return the connection of an authenticated client."""
        thread = threading.current_thread()
        sock.settimeout(HANDSHAKE_TIMEOUT)  # limit of each read; the acceptor enforces the whole
        if self._context:
            sock = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            with self._lock:  # the wrapped socket has taken over the file descriptor
                self._arriving[thread] = (self._arriving[thread][0], sock)
            sock.do_handshake()
        connection = Connection(sock, HANDSHAKE_TIMEOUT)
        server_handshake(connection, self.endpoint.token)
        with self._lock:
            del self._arriving[thread]
            if self._closed or len(self._serving) >= self._limits.connections:
                raise TransportError("closed, or too many connections")
            self._serving[thread] = connection
        connection.stall = self._limits.stall
        return connection

    def _answer_one(self, connection: Connection) -> bool:
        """Answer one request; return False when the client has disconnected. Holds no reference to it afterwards."""
        message = connection.read_message(wait=None)
        if message is None:
            return False
        kind, request, nbytes = message
        operation, fields = request.get("operation"), request.get("fields")
        if kind != REQUEST or not isinstance(operation, str) or not isinstance(fields, dict):
            raise TransportError("not a request")
        if nbytes > self._limits.nbytes:
            text = f"{operation}: refused: {nbytes:,} bytes announced, at most {self._limits.nbytes:,} are taken"
            connection.refuse(ERROR, _error_header(WeightsError(text)), nbytes)
            return False
        body = Body(connection, nbytes)
        try:
            answer = self._handle(operation, fields, body)
            reply, buffers = answer if isinstance(answer, tuple) else (answer, ())
            kind, header, views = REPLY, encode_header(reply), [view_of(buffer) for buffer in buffers]
        except TransportError:
            raise
        except Exception as error:
            if not isinstance(error, UserError | ValueError | KeyError | OSError):
                logging.getLogger(__name__).warning("%s failed", operation, exc_info=True)  # a bug
            kind, header, views = ERROR, _error_header(error), []
        body.drain()
        connection.send_message(kind, header, views)
        return True


def _shut(sock: socket.socket) -> None:
    """Unblock the thread that reads from a socket."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # SSLSocket.shutdown is not thread-safe


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
            listener.settimeout(1.0)  # interval of looking for overdue strangers
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        where = Endpoint(host, port, "").address
        reason = error.strerror or error
        raise UserError(f"cannot listen on {where}: {reason}; port=0 takes any free port") from error
    return listener


def _error_header(error: Exception) -> bytes:
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return encode_header({"error": text[:100_000], "kind": type(error).__name__})
