"""The side of the wire that asks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Buffer, Callable, Sequence
from typing import Any

from rl.parameter_server.errors import WeightsError
from rl.parameter_server.transport.connection import (
    ERROR,
    MAX_NBYTES,
    REPLY,
    REQUEST,
    Connection,
    TransportError,
    encode_header,
    view_of,
)
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.handshake import client_handshake
from rl.parameter_server.transport.tls import Tls, reason_of
from rl.roles.timeouts import Waits

Fields = dict[str, Any]
Into = Callable[[Fields, int], Sequence[Buffer]]
OnWait = Callable[[str, float], None]

_LOOK = 1.0  # seconds between looks at how long a call has lasted
_NOW = 0.001  # seconds: what has come is taken


class Unreachable(WeightsError):
    """No answer: nobody listens, the connection broke, nothing came in time, or the token or certificate is wrong."""


class RpcClient:
    """Asks a server. Thread-safe: calls at the same time take a connection each, which are kept for later calls.

    Args:
        where: the server, or a function that resolves its current endpoint. After a failed call the endpoint is
            resolved again and the call repeated, for up to `retry_timeout` seconds. A UserError or OSError of the
            function counts as a failed call.
        name: of the server, for errors.
        connect_timeout: seconds to connect, and that the server may make no progress.
        retry_timeout: seconds.
        tls: our own certificate, or other options than to verify the server by its endpoint's `tls_ca`.
        max_nbytes: an answer that announces more is refused.
        on_wait: told what a call waits for, and for how many seconds it has, once it has lasted (with all repetitions)
            `warn_after` seconds, and whenever that has doubled. Its field `timeout`, if it has one, is time in which
            nothing need come.
        warn_after: seconds.
    """

    def __init__(
        self,
        where: Endpoint | Callable[[], Endpoint],
        *,
        name: str,
        connect_timeout: float = 10.0,
        retry_timeout: float = 90.0,
        tls: Tls | None = None,
        max_nbytes: int = MAX_NBYTES,
        on_wait: OnWait | None = None,
        warn_after: float = 30.0,
    ):
        self._locate = None if isinstance(where, Endpoint) else where
        self._endpoint = where if isinstance(where, Endpoint) else None
        self._name, self._connect_timeout, self._retry_timeout = name, connect_timeout, retry_timeout
        self._tls, self._max_nbytes = tls, max_nbytes
        self._on_wait, self._warn_after = on_wait, warn_after
        self._lock = threading.Lock()
        self._idle: list[tuple[Endpoint, Connection]] = []
        self._busy: set[Connection] = set()
        self._closed = threading.Event()

    def call(
        self,
        operation: str,
        fields: Fields | None = None,
        buffers: Sequence[Buffer] = (),
        *,
        into: Into | None = None,
        timeout: float = 0.0,
    ) -> tuple[Fields, bytearray | None]:
        """Sends a request and waits for the answer.

        Args:
            operation: what the server shall do.
            fields: JSON.
            buffers: bytes to send, C-contiguous; they must not change meanwhile.
            into: given the answer's fields and how many bytes it has, the memory they go to. Called again when a call
                is repeated: memory of a failed attempt holds anything.
            timeout: seconds that the server may take, beyond `connect_timeout`, until its answer begins.

        Returns:
            The answer's fields, and its bytes unless there is an `into`.

        Raises:
            WeightsError: what the server raised. Unreachable: there is no answer.
        """
        header = encode_header({"operation": operation, "fields": fields or {}})
        views = [view_of(buffer) for buffer in buffers]
        wait = self._connect_timeout + timeout
        tell = self._teller(operation, fields)
        began: float | None = None
        tries = 0
        while True:
            tries += 1
            endpoint = self._endpoint
            try:
                if endpoint is None:
                    assert self._locate is not None
                    endpoint = self._endpoint = self._locate()
                return self._exchange(endpoint, header, views, into, wait, tell)
            except TransportError as error:
                reason, cause = str(error), error
            except (OSError, WeightsError) as error:
                if endpoint is not None:
                    raise  # the server's answer, or of `into`
                reason, cause = f"where it is cannot be found: {error}", error
            if self._locate is not None:
                self._endpoint = None  # asked again, now or by the next call
            began = began or time.monotonic()
            spent = time.monotonic() - began
            if self._locate is None or spent > self._retry_timeout or self._closed.is_set():
                tried = f" (tried {tries} times in {spent:.0f} s)" if tries > 1 else ""
                raise Unreachable(f"{self._peer(endpoint)}: {operation} failed: {reason}{tried}") from cause
            tell()
            self._closed.wait(0.2)

    def close(self) -> None:
        """Closes all connections; calls that are under way fail."""
        self._closed.set()
        with self._lock:
            connections = [connection for _, connection in self._idle]
            self._idle.clear()
            for connection in self._busy:
                connection.abort()
        for connection in connections:
            connection.close()

    def _peer(self, endpoint: Endpoint | None) -> str:
        return f"{self._name} {endpoint.address}" if endpoint else self._name

    def _exchange(
        self,
        endpoint: Endpoint,
        header: bytes,
        views: list[memoryview],
        into: Into | None,
        wait: float,
        tell: Callable[[], None],
    ) -> tuple[Fields, bytearray | None]:
        """One request and its answer. TransportError: no answer; WeightsError: the answer."""
        connection, reply, kind, nbytes = self._ask(endpoint, header, views, wait, tell)
        kept = False
        try:
            data = None
            if kind == ERROR:
                connection.drain(nbytes)
            elif into is None:
                data = bytearray(nbytes)
                connection.read_into([memoryview(data)])
            else:
                targets = [view_of(target) for target in into(reply, nbytes)]
                room = sum(target.nbytes for target in targets)
                if room != nbytes:
                    raise WeightsError(f"{self._peer(endpoint)}: {nbytes:,} bytes came for memory of {room:,}")
                connection.read_into(targets)
            kept = True
        finally:
            self._give_back(endpoint, connection, kept)
        if kind == ERROR:
            raise _error_of(reply, self._peer(endpoint))
        return reply, data

    def _ask(
        self, endpoint: Endpoint, header: bytes, views: list[memoryview], wait: float, tell: Callable[[], None]
    ) -> tuple[Connection, Fields, int, int]:
        """Sends a request; the connection with the answer's bytes still to read, its fields, kind and bytes."""
        while True:
            connection, used = self._take(endpoint)
            try:
                try:
                    connection.send_message(REQUEST, header, views)
                except TransportError as error:
                    if error.stalled:
                        raise
                    # The server may have refused the request before all was sent: its answer says why.
                    message = self._refusal(connection)
                    if message is None:
                        raise
                else:
                    message = connection.read_message(self._await(connection, wait, tell))
                if message is None:
                    raise TransportError("the connection was closed")
                kind, reply, nbytes = message
                if kind not in (REPLY, ERROR):
                    raise TransportError("not an answer")
                if nbytes > self._max_nbytes:
                    raise TransportError(f"refused: an answer of {nbytes:,} bytes (at most {self._max_nbytes:,})")
                return connection, reply, kind, nbytes
            except BaseException as error:
                self._give_back(endpoint, connection, keep=False)
                if not (used and isinstance(error, TransportError) and not error.stalled):
                    raise
                self._forget_idle(endpoint)  # closed while it was idle, when the server was started again: once more

    def _teller(self, operation: str, fields: Fields | None) -> Callable[[], None]:
        """To be called now and then in the course of a call."""
        if (on_wait := self._on_wait) is None:
            return lambda: None
        waits = Waits(self._warn_after + float((fields or {}).get("timeout", 0.0)))
        waits.begin(operation)

        def tell() -> None:
            if waits.due(operation):
                on_wait(f"to answer ({operation})", waits.begin(operation))

        return tell

    def _await(self, connection: Connection, wait: float, tell: Callable[[], None]) -> float:
        """Returns when an answer has begun or `wait` is over, and how much of `wait` is left then."""
        if self._on_wait is None:
            return wait
        give_up = time.monotonic() + wait
        while not connection.readable(max(0.0, min(_LOOK, give_up - time.monotonic()))):
            tell()
            if time.monotonic() >= give_up:
                break
        return max(_NOW, give_up - time.monotonic())

    def _refusal(self, connection: Connection) -> tuple[int, Fields, int] | None:
        try:
            return connection.read_message(1.0)
        except TransportError:
            return None

    def _take(self, endpoint: Endpoint) -> tuple[Connection, bool]:
        """A connection, and whether it has been used before."""
        with self._lock:
            if self._closed.is_set():
                raise TransportError("the client is closed")
            for at in reversed(range(len(self._idle))):
                if self._idle[at][0] == endpoint:
                    connection = self._idle.pop(at)[1]
                    self._busy.add(connection)
                    return connection, True
        connection = self._connect(endpoint)
        with self._lock:
            self._busy.add(connection)
        return connection, False

    def _connect(self, endpoint: Endpoint) -> Connection:
        try:
            sock = socket.create_connection((endpoint.host, endpoint.port), self._connect_timeout)
        except TimeoutError as error:
            raise TransportError(f"no connection within {self._connect_timeout:g} s", stalled=True) from error
        except OSError as error:
            raise TransportError(error.strerror or str(error)) from error
        if endpoint.tls_ca:
            tls = self._tls = self._tls or Tls.Config(ca=endpoint.tls_ca).build()
            try:
                sock = tls.client_context.wrap_socket(sock, server_hostname=endpoint.host)
            except OSError as error:
                sock.close()
                raise TransportError(reason_of(error)) from error
        connection = Connection(sock, self._connect_timeout)
        try:
            client_handshake(connection, endpoint.token)
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_back(self, endpoint: Endpoint, connection: Connection, keep: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if keep and endpoint == self._endpoint and not self._closed.is_set():
                self._idle.append((endpoint, connection))
                return
        connection.close()

    def _forget_idle(self, endpoint: Endpoint) -> None:
        with self._lock:
            gone = [connection for place, connection in self._idle if place == endpoint]
            self._idle = [one for one in self._idle if one[0] != endpoint]
        for connection in gone:
            connection.close()


def _error_of(reply: Fields, peer: str) -> WeightsError:
    """The error that a server raised: of its class if that is one of WeightsError's. That another server behind it is
    Unreachable does not make it so.
    """
    classes: dict[str, type[WeightsError]] = {}
    waiting = [WeightsError]
    while waiting:
        one = waiting.pop()
        classes[one.__name__] = one
        waiting.extend(one.__subclasses__())
    classes.pop(Unreachable.__name__)
    return classes.get(str(reply.get("kind")), WeightsError)(f"{peer}: {reply.get('error')}")
