"""Messages between the processes of an elastic run: a JSON header, and arrays as they lie in memory; no pickles.

Both ends prove by HMAC that they know the run's key, which is never sent (`multiprocessing.connection`).
"""

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import jax.numpy as jnp
import numpy as np

Address = tuple[str, int]
_HEADER = 16 << 20  # bytes of a header at most
_PROOF = 10  # seconds for the other end to prove the key

FAILURES = (OSError, EOFError)  # errors of a channel whose other end is gone


class Channel:
    """One connection; several threads may send, one at a time receives."""

    def __init__(self, sock: socket.socket, key: bytes, *, serves: bool):
        """Take over a connected socket, and prove the key to the other end (AuthenticationError: it is another)."""
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection: Any = Connection(sock.detach())
        self._sending = threading.Lock()
        prove = (deliver_challenge, answer_challenge) if serves else (answer_challenge, deliver_challenge)
        self._wait_at_most(_PROOF)
        for half in prove:
            half(self._connection, key)
        self._wait_at_most(0)

    def send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Send a message (OSError: the other end is gone)."""
        shapes = [(array.dtype.name, array.shape) for array in arrays]
        with self._sending:
            self._connection.send_bytes(json.dumps({**header, "arrays": shapes}).encode())
            for array in arrays:
                self._connection.send_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return the next message (OSError, EOFError: the other end is gone)."""
        header = json.loads(self._connection.recv_bytes(_HEADER))
        arrays = [np.empty(shape, jnp.dtype(name)) for name, shape in header.pop("arrays")]
        for array in arrays:
            self._connection.recv_bytes_into(array.reshape(-1).view(np.uint8))
        return header, arrays

    def cut(self) -> None:
        """End the connection, also for a thread that waits on it."""
        with contextlib.suppress(OSError), self._socket() as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def _wait_at_most(self, seconds: int) -> None:
        """Let a read that nothing comes for be an OSError after so many seconds; 0: never."""
        with self._socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))

    def _socket(self) -> socket.socket:
        """Return the socket, which the caller closes."""
        return socket.socket(fileno=os.dup(self._connection.fileno()))


def connect(address: Address, key: bytes, *, timeout: float) -> Channel:
    """Return a channel to the process that listens at an address (OSError: nobody does)."""
    return Channel(socket.create_connection(address, timeout=timeout), key, serves=False)


class Listener:
    """A port of this machine; each channel that is opened to it is served by a thread of its own."""

    def __init__(self, key: bytes, serve: Callable[[Channel], None], host: str = "127.0.0.1"):
        """`serve`: called with each channel; the other end may be gone at any moment."""
        self._key, self._serve = key, serve
        self._socket = socket.create_server((host, 0), backlog=128)
        self.address: Address = self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, name="elastic-accept", daemon=True).start()

    def close(self) -> None:
        """Accept no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock = self._socket.accept()[0]
                threading.Thread(target=self._greet, args=(sock,), name="elastic-peer", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        from multiprocessing import AuthenticationError

        with contextlib.suppress(*FAILURES, AuthenticationError):
            self._serve(Channel(sock, self._key, serves=True))
