"""Connections of one client to a server that may move: idle ones are kept and reused."""

import socket
import threading

from rl.parameter_server.transport.connection import Connection, TransportError
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.handshake import client_handshake
from rl.parameter_server.transport.tls import Tls, reason_of


class ConnectionPool:
    """Authenticated connections, one per concurrent call. Thread-safe.

    Args:
        connect_timeout: seconds to connect; also the stall timeout of the connections.
        tls: own certificate and options; None: verify the server by its endpoint's `tls_ca`.
    """

    def __init__(self, connect_timeout: float, tls: Tls | None):
        self._connect_timeout, self._tls = connect_timeout, tls
        self._lock = threading.Lock()
        self._idle: list[tuple[Endpoint, Connection]] = []
        self._busy: set[Connection] = set()
        self.closed = threading.Event()

    def take(self, endpoint: Endpoint) -> tuple[Connection, bool]:
        """Return a connection for one call, and True if it was used before. Raises TransportError."""
        with self._lock:
            if self.closed.is_set():
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

    def give_back(self, endpoint: Endpoint, connection: Connection, *, keep: bool) -> None:
        """End the use of a connection; `keep` it for later calls, or close it."""
        with self._lock:
            self._busy.discard(connection)
            if keep and not self.closed.is_set():
                self._idle.append((endpoint, connection))
                return
        connection.close()

    def drop_idle(self, endpoint: Endpoint) -> None:
        """Close the idle connections to an endpoint."""
        with self._lock:
            dropped = [connection for place, connection in self._idle if place == endpoint]
            self._idle = [(place, connection) for place, connection in self._idle if place != endpoint]
        for connection in dropped:
            connection.close()

    def close(self) -> None:
        """Close all connections; calls in progress fail."""
        self.closed.set()
        with self._lock:
            idle = [connection for _, connection in self._idle]
            self._idle.clear()
            for connection in self._busy:
                connection.abort()
        for connection in idle:
            connection.close()

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
