"""The client side of the RPC."""

from __future__ import annotations

import time
from collections.abc import Buffer, Callable, Sequence
from typing import Any

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
from rl.parameter_server.transport.connection_pool import ConnectionPool
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.tls import Tls
from rl.protocol.timeouts import Waits

Fields = dict[str, Any]
Into = Callable[[Fields, int], Sequence[Buffer]]
OnWait = Callable[[str, float], None]

_CHECK_S = 1.0  # seconds between checks of how long a call has lasted
_IMMEDIATE = 0.001  # seconds: only data that has arrived already


class Unreachable(WeightsError):
    """No reply: nothing listens, the connection broke or timed out, or the token or certificate is wrong."""


class RpcClient:
    """Client of one server. Thread-safe: concurrent calls use a connection each, which later calls reuse.

    Args:
        where: the server, or a function that resolves its current endpoint. After a failed call the endpoint is
            resolved again and the call repeated, for up to `retry_timeout` seconds. A UserError or OSError of the
            function counts as a failed call.
        name: name of the server, for errors.
        connect_timeout: seconds to connect, and without progress in a message.
        tls: own certificate, or options other than to verify the server by its endpoint's `tls_ca`.
        max_nbytes: replies that announce more are refused.
        on_wait: called with what a call waits for and for how many seconds, once it has lasted (retries included)
            `warn_after` seconds, and whenever that has doubled. The call's field `timeout`, if it has one, is not
            counted.
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
        self._max_nbytes, self._on_wait, self._warn_after = max_nbytes, on_wait, warn_after
        self._pool = ConnectionPool(connect_timeout, tls)

    def call(
        self,
        operation: str,
        fields: Fields | None = None,
        buffers: Sequence[Buffer] = (),
        *,
        into: Into | None = None,
        timeout: float = 0.0,
    ) -> tuple[Fields, bytearray | None]:
        """Send a request and wait for the reply.

        Args:
            fields: arguments that JSON can hold.
            buffers: bytes to send, C-contiguous; they must not change during the call.
            into: function from the reply's fields and number of bytes to the buffers that receive the bytes. Called
                again for every retry; after a failed attempt the buffers' contents are undefined.
            timeout: seconds that the server may take, beyond `connect_timeout`, until its reply begins.

        Returns:
            The reply's fields, and its bytes unless `into` is given.

        Raises:
            WeightsError: raised by the server. Unreachable: there is no reply.
        """
        header = encode_header({"operation": operation, "fields": fields or {}})
        views = [view_of(buffer) for buffer in buffers]
        wait = self._connect_timeout + timeout
        report = self._reporter(operation, fields)
        began: float | None = None
        tries = 0
        while True:
            tries += 1
            endpoint = self._endpoint
            try:
                if endpoint is None:
                    assert self._locate is not None
                    endpoint = self._endpoint = self._locate()
                return self._exchange(endpoint, header, views, into, wait, report)
            except TransportError as error:
                reason, cause = str(error), error
            except (OSError, WeightsError) as error:
                if endpoint is not None:
                    raise  # the server's reply, or an error of `into`
                reason, cause = f"its endpoint cannot be resolved: {error}", error
            if self._locate is not None:
                self._endpoint = None  # resolved again, now or by the next call
            began = began or time.monotonic()
            spent = time.monotonic() - began
            if self._locate is None or spent > self._retry_timeout or self._pool.closed.is_set():
                tried = f" (tried {tries} times in {spent:.0f} s)" if tries > 1 else ""
                raise Unreachable(f"{self._peer(endpoint)}: {operation} failed: {reason}{tried}") from cause
            report()
            self._pool.closed.wait(0.2)

    def close(self) -> None:
        """Close all connections; calls in progress fail."""
        self._pool.close()

    def _peer(self, endpoint: Endpoint | None) -> str:
        return f"{self._name} {endpoint.address}" if endpoint else self._name

    def _exchange(
        self,
        endpoint: Endpoint,
        header: bytes,
        views: list[memoryview],
        into: Into | None,
        wait: float,
        report: Callable[[], None],
    ) -> tuple[Fields, bytearray | None]:
        """Send one request and read its reply. TransportError: no reply; WeightsError: the reply is an error."""
        connection, reply, kind, nbytes = self._request(endpoint, header, views, wait, report)
        complete = False
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
            complete = True
        finally:
            self._pool.give_back(endpoint, connection, keep=complete and endpoint == self._endpoint)
        if kind == ERROR:
            raise _error_of(reply, self._peer(endpoint))
        return reply, data

    def _request(
        self, endpoint: Endpoint, header: bytes, views: list[memoryview], wait: float, report: Callable[[], None]
    ) -> tuple[Connection, Fields, int, int]:
        """Send a request. Return the connection with the reply's body still to read, its fields, kind and bytes."""
        while True:
            connection, used = self._pool.take(endpoint)
            try:
                try:
                    connection.send_message(REQUEST, header, views)
                except TransportError as error:
                    if error.stalled:
                        raise
                    # The server may have refused the request before all of it was sent: its reply says why.
                    message = _refusal(connection)
                    if message is None:
                        raise
                else:
                    message = connection.read_message(self._await(connection, wait, report))
                if message is None:
                    raise TransportError("the connection was closed")
                kind, reply, nbytes = message
                if kind not in (REPLY, ERROR):
                    raise TransportError("not a reply")
                if nbytes > self._max_nbytes:
                    raise TransportError(f"refused: a reply of {nbytes:,} bytes (at most {self._max_nbytes:,})")
                return connection, reply, kind, nbytes
            except BaseException as error:
                self._pool.give_back(endpoint, connection, keep=False)
                if not (used and isinstance(error, TransportError) and not error.stalled):
                    raise
                self._pool.drop_idle(endpoint)  # closed while idle, when the server was restarted: try once more

    def _reporter(self, operation: str, fields: Fields | None) -> Callable[[], None]:
        """Return a function to call periodically during a call; it calls `on_wait` when that is due."""
        if (on_wait := self._on_wait) is None:
            return lambda: None
        waits = Waits(self._warn_after + float((fields or {}).get("timeout", 0.0)))
        waits.begin(operation)

        def report() -> None:
            if waits.due(operation):
                on_wait(f"to answer ({operation})", waits.begin(operation))

        return report

    def _await(self, connection: Connection, wait: float, report: Callable[[], None]) -> float:
        """Wait until a reply has begun or `wait` seconds are over; return how much of `wait` is left."""
        if self._on_wait is None:
            return wait
        deadline = time.monotonic() + wait
        while not connection.readable(max(0.0, min(_CHECK_S, deadline - time.monotonic()))):
            report()
            if time.monotonic() >= deadline:
                break
        return max(_IMMEDIATE, deadline - time.monotonic())


def _refusal(connection: Connection) -> tuple[int, Fields, int] | None:
    try:
        return connection.read_message(1.0)
    except TransportError:
        return None


def _error_of(reply: Fields, peer: str) -> WeightsError:
    """Return a server's error, in its class if a WeightsError, but for `Unreachable`: of a server behind it."""
    classes: dict[str, type[WeightsError]] = {}
    waiting = [WeightsError]
    while waiting:
        one = waiting.pop()
        classes[one.__name__] = one
        waiting.extend(one.__subclasses__())
    classes.pop(Unreachable.__name__)
    return classes.get(str(reply.get("kind")), WeightsError)(f"{peer}: {reply.get('error')}")
