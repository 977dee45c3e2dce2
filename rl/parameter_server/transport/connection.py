"""One connection between two processes: messages of a small JSON header and a body of any number of bytes.

    message = magic "AXLW" | kind (1 byte) | 3 zero bytes | header length (u32) | body length (u64) | header | body

Nothing is unpickled. Before the first message each side proves that it knows the token (`handshake.py`).

Data goes from and to the caller's memory: whole lists of buffers in one system call, no copy in this process. Timeouts
are the kernel's (SO_RCVTIMEO), so that one read can request all bytes (MSG_WAITALL) and still time out. Socket buffer
sizes are left to the kernel's autotuning: an explicit size is capped at `net.core.rmem_max` and never grows.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from rl.parameter_server.transport.buffers import transfer_batches

REQUEST, REPLY, ERROR = range(3)  # kinds of messages
MAX_HEADER = 16 << 20  # bytes
MAX_NBYTES = 1 << 36  # default limit of a body
_FRAME = struct.Struct("!4sB3xIQ")
_MAGIC = b"AXLW"
_SCRATCH = 1 << 18
_TLS_RECORD = 1 << 14


class TransportError(Exception):
    """The connection is unusable."""

    def __init__(self, message: str, *, stalled: bool = False):
        super().__init__(message)
        self.stalled = stalled  # the connection is open, but made no progress within the timeout


def encode_header(header: dict[str, Any]) -> bytes:
    """Encode a header as JSON; raise ValueError if it is too large."""
    encoded = json.dumps(header, separators=(",", ":")).encode()
    if len(encoded) > MAX_HEADER:
        raise ValueError(f"a header of {len(encoded):,} bytes is too large (at most {MAX_HEADER:,})")
    return encoded


class Connection:
    """Connected socket, plain or TLS, used by one thread at a time; only `abort` may be called from another thread.

    All methods that send or receive raise TransportError.

    Args:
        sock: the socket; owned by the connection from now on.
        stall: seconds without progress in the middle of a message before the connection counts as stalled.
    """

    def __init__(self, sock: socket.socket, stall: float):
        self._sock = sock
        self.stall = stall
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._timeout: float | None = -1.0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects dead hosts on idle connections
        for option, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)

    def send_message(self, kind: int, header: bytes, body: Sequence[memoryview] = ()) -> None:
        """Send a message."""
        self._set_timeout(self.stall)
        frame = _FRAME.pack(_MAGIC, kind, len(header), sum(view.nbytes for view in body))
        self._send([memoryview(frame + header), *body])

    def read_message(self, wait: float | None) -> tuple[int, dict[str, Any], int] | None:
        """Read the next message except its body, which the caller must read or drain.

        Args:
            wait: seconds until the message begins; None: no limit.

        Returns:
            Kind, header, and bytes of the body; None if the peer has closed the connection.

        Raises:
            TransportError: no message arrived, or it violates the protocol.
        """
        frame = bytearray(_FRAME.size)
        if not self._read_frame(frame, wait):
            return None
        magic, kind, length, nbytes = _FRAME.unpack(frame)
        if magic != _MAGIC:
            raise TransportError("received something that is not a message of this protocol")
        if length > MAX_HEADER:
            raise TransportError(f"refused: a header of {length:,} bytes (at most {MAX_HEADER:,})")
        encoded = bytearray(length)
        self.read_into([memoryview(encoded)])
        try:
            header = json.loads(encoded)
        except (ValueError, RecursionError) as error:
            raise TransportError(f"a header that is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise TransportError("a header that is not a JSON object")
        return kind, header, nbytes

    def readable(self, seconds: float) -> bool:
        """Wait up to so many seconds until there is data to read or the peer has closed the connection."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        watch = select.poll()
        watch.register(self._sock, select.POLLIN)
        return bool(watch.poll(seconds * 1000))

    def read_into(self, views: Iterable[memoryview]) -> None:
        """Fill these views of bytes, in order."""
        self._set_timeout(self.stall)
        self._read(list(views))

    def send(self, data: bytes) -> None:
        """Send a few bytes outside any message."""
        self._set_timeout(self.stall)
        self._send([memoryview(data)])

    def read(self, nbytes: int) -> bytes:
        """Read a few bytes outside any message."""
        data = bytearray(nbytes)
        self.read_into([memoryview(data)])
        return bytes(data)

    def drain(self, nbytes: int) -> None:
        """Read and discard so many bytes."""
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH)))
        while nbytes:
            count = min(nbytes, _SCRATCH)
            self.read_into([scratch[:count]])
            nbytes -= count

    def refuse(self, kind: int, header: bytes, nbytes: int) -> None:
        """Send a last message to a peer that may still be sending: an immediate close would discard it unread."""
        self.send_message(kind, header)
        with contextlib.suppress(OSError, TransportError):
            self._sock.shutdown(socket.SHUT_WR)
            self.drain(min(nbytes, 1 << 30))

    def abort(self) -> None:
        """Unblock a thread that waits on this connection, from another thread."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # SSLSocket.shutdown is not thread-safe

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def _set_timeout(self, seconds: float | None) -> None:
        if seconds == self._timeout:
            return
        self._timeout = seconds
        try:
            if self._tls:
                self._sock.settimeout(seconds)
                return
            self._sock.settimeout(None)
            micros = 0 if seconds is None else max(int(seconds * 1e6), 1)
            timeval = struct.pack("@ll", *divmod(micros, 1_000_000))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)
        except OSError as error:
            raise TransportError(_reason(error)) from error

    def _read_frame(self, frame: bytearray, wait: float | None) -> bool:
        """Read a frame; return False if the peer closed the connection before its first byte."""
        self._set_timeout(wait)
        try:
            self._read([memoryview(frame)])
        except _Closed as error:
            if error.at_start:
                return False
            raise
        return True

    def _send(self, views: list[memoryview]) -> None:
        try:
            if self._tls:
                self._send_tls(views)
            else:
                transfer_batches(views, self._sock.sendmsg)
        except (BlockingIOError, TimeoutError) as error:
            raise TransportError(f"nothing was taken for {self._timeout:g} s", stalled=True) from error
        except OSError as error:
            raise TransportError(_reason(error)) from error

    def _send_tls(self, views: list[memoryview]) -> None:
        small = bytearray()  # coalesced: a TLS record per few bytes would be expensive
        for view in views:
            if view.nbytes < _TLS_RECORD and len(small) < _SCRATCH:
                small += view
                continue
            self._sock.sendall(small)
            small = bytearray()
            self._sock.sendall(view)
        self._sock.sendall(small)

    def _read(self, views: list[memoryview]) -> None:
        try:
            if self._tls:
                for view in views:
                    while view.nbytes:
                        view = view[_received(self._sock.recv_into(view), view is views[0]) :]
            elif len(views) == 1:
                view = views[0]
                while view.nbytes:
                    count = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
                    view = view[_received(count, view is views[0]) :]
            else:
                transfer_batches(views, lambda some: _received(self._sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0]))
        except (BlockingIOError, TimeoutError) as error:
            raise TransportError(f"nothing came for {self._timeout:g} s", stalled=True) from error
        except OSError as error:
            raise TransportError(_reason(error)) from error


class _Closed(TransportError):
    """The peer closed the connection; `at_start`: before the first requested byte."""

    def __init__(self, at_start: bool):
        super().__init__("the connection was closed")
        self.at_start = at_start


def _received(count: int, at_start: bool = False) -> int:
    if not count:
        raise _Closed(at_start)
    return count


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
