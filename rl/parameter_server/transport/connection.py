"""One connection between two processes: messages of a small JSON header and any number of bytes.

    message = magic "AXLW" | kind (1 byte) | 3 zero bytes | header length (u32) | body length (u64) | header | body

Nothing is unpickled. Before the first message each side proves that it knows the token (`handshake.py`).

Bytes go from and to the caller's memory: whole lists of buffers in one system call, no copy in this process. Waits are
the kernel's (SO_RCVTIMEO), so that a read may ask for everything at once (MSG_WAITALL) and still end. Buffers of the
socket are left to the kernel's tuning: a size asked for is cut to `net.core.rmem_max` and never grows.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import struct
from collections.abc import Buffer, Iterable, Sequence
from typing import Any

import numpy as np

REQUEST, REPLY, ERROR = range(3)  # kinds of messages
MAX_HEADER = 16 << 20  # bytes
MAX_NBYTES = 1 << 36  # of a body, where nothing else is said
_FRAME = struct.Struct("!4sB3xIQ")
_MAGIC = b"AXLW"
_IOV = 1024  # buffers in one system call: IOV_MAX of Linux and macOS
_SCRATCH = 1 << 18
_TLS_RECORD = 1 << 14


class TransportError(Exception):
    """The connection is of no more use.

    Attributes:
        stalled: it is open, but nothing moved for as long as one may wait.
    """

    def __init__(self, message: str, *, stalled: bool = False):
        super().__init__(message)
        self.stalled = stalled


def view_of(buffer: Buffer) -> memoryview:
    """A buffer's bytes without a copy, numpy arrays of any dtype included. ValueError unless it is C-contiguous."""
    if isinstance(buffer, np.ndarray):  # by way of uint8: bfloat16 has no buffer protocol
        if not buffer.flags.c_contiguous:
            raise ValueError(f"an array of shape {buffer.shape} that is not C-contiguous cannot travel without a copy")
        return memoryview(buffer.reshape(-1).view(np.uint8))
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("a buffer that is not C-contiguous cannot travel without a copy")
    return view.cast("B") if view.nbytes else memoryview(b"")


def encode_header(header: dict[str, Any]) -> bytes:
    """A header as JSON; ValueError if it is too large."""
    encoded = json.dumps(header, separators=(",", ":")).encode()
    if len(encoded) > MAX_HEADER:
        raise ValueError(f"a header of {len(encoded):,} bytes is too large (at most {MAX_HEADER:,})")
    return encoded


class Connection:
    """A connected socket, plain or TLS, used by one thread at a time; only `abort` may come from another.

    Args:
        sock: taken over.
        stall: seconds that the other side may keep us waiting in the middle of something.
    """

    def __init__(self, sock: socket.socket, stall: float):
        self._sock = sock
        self.stall = stall
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._wait: float | None = -1.0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that is gone is noticed on idle connections
        for option, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)

    def send_message(self, kind: int, header: bytes, body: Sequence[memoryview] = ()) -> None:
        """Sends a message. Raises TransportError."""
        self._wait_at_most(self.stall)
        frame = _FRAME.pack(_MAGIC, kind, len(header), sum(view.nbytes for view in body))
        self._send([memoryview(frame + header), *body])

    def read_message(self, wait: float | None) -> tuple[int, dict[str, Any], int] | None:
        """The next message without its body, which the caller must read or drain; None if the other side has ended.

        Args:
            wait: seconds until it begins; None: forever.

        Returns:
            Kind, header, bytes of the body.

        Raises:
            TransportError: there is none, or it is not one of ours.
        """
        frame = bytearray(_FRAME.size)
        if not self._read_waiting(frame, wait):
            return None
        magic, kind, length, nbytes = _FRAME.unpack(frame)
        if magic != _MAGIC:
            raise TransportError("what came is not a message of this protocol")
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
        """Waits so long at most until there is something to read, or the other side has ended."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        watch = select.poll()
        watch.register(self._sock, select.POLLIN)
        return bool(watch.poll(seconds * 1000))

    def read_into(self, views: Iterable[memoryview]) -> None:
        """Fills these views of bytes, in order. Raises TransportError."""
        self._wait_at_most(self.stall)
        self._read(list(views))

    def send(self, data: bytes) -> None:
        """Sends a few bytes that are no message. Raises TransportError."""
        self._wait_at_most(self.stall)
        self._send([memoryview(data)])

    def read(self, nbytes: int) -> bytes:
        """A few bytes. Raises TransportError."""
        data = bytearray(nbytes)
        self.read_into([memoryview(data)])
        return bytes(data)

    def drain(self, nbytes: int) -> None:
        """Reads and forgets. Raises TransportError."""
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH)))
        while nbytes:
            count = min(nbytes, _SCRATCH)
            self.read_into([scratch[:count]])
            nbytes -= count

    def refuse(self, kind: int, header: bytes, nbytes: int) -> None:
        """A last answer to someone who may be sending still: a close at once would throw the answer away unread."""
        self.send_message(kind, header)
        with contextlib.suppress(OSError, TransportError):
            self._sock.shutdown(socket.SHUT_WR)
            self.drain(min(nbytes, 1 << 30))

    def abort(self) -> None:
        """Ends what another thread waits for on this connection."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not SSLSocket's, which is not for other threads

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()

    def _wait_at_most(self, seconds: float | None) -> None:
        if seconds == self._wait:
            return
        self._wait = seconds
        try:
            if self._tls:
                self._sock.settimeout(seconds)
                return
            self._sock.settimeout(None)
            whole = 0 if seconds is None else max(int(seconds * 1e6), 1)
            timeval = struct.pack("@ll", *divmod(whole, 1_000_000))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)
        except OSError as error:
            raise TransportError(_reason(error)) from error

    def _read_waiting(self, frame: bytearray, wait: float | None) -> bool:
        """False if the other side ended before the first byte."""
        self._wait_at_most(wait)
        try:
            self._read([memoryview(frame)])
        except _Ended as error:
            if error.nothing:
                return False
            raise
        return True

    def _send(self, views: list[memoryview]) -> None:
        try:
            if self._tls:
                self._send_tls(views)
            else:
                _in_batches(views, self._sock.sendmsg)
        except (BlockingIOError, TimeoutError) as error:
            raise TransportError(f"nothing was taken for {self._wait:g} s", stalled=True) from error
        except OSError as error:
            raise TransportError(_reason(error)) from error

    def _send_tls(self, views: list[memoryview]) -> None:
        small = bytearray()  # a record for every few bytes would be dear
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
                        view = view[self._some(self._sock.recv_into(view), view is views[0]) :]
            elif len(views) == 1:
                view = views[0]
                while view.nbytes:
                    count = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
                    view = view[self._some(count, view is views[0]) :]
            else:
                _in_batches(views, self._receive)
        except (BlockingIOError, TimeoutError) as error:
            raise TransportError(f"nothing came for {self._wait:g} s", stalled=True) from error
        except OSError as error:
            raise TransportError(_reason(error)) from error

    def _receive(self, views: list[memoryview]) -> int:
        return self._some(self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0], False)

    @staticmethod
    def _some(count: int, first: bool) -> int:
        if not count:
            raise _Ended(first)
        return count


class _Ended(TransportError):
    """The other side closed the connection; `nothing` of what was asked for had come."""

    def __init__(self, nothing: bool):
        super().__init__("the connection was closed")
        self.nothing = nothing


def _in_batches(views: list[memoryview], move: Any) -> None:
    """Moves all these bytes by `move(views) -> count`, at most `_IOV` buffers a call."""
    views = [view for view in views if view.nbytes]
    at = 0
    while at < len(views):
        count = move(views[at : at + _IOV])
        while count and count >= views[at].nbytes:
            count -= views[at].nbytes
            at += 1
        if count:
            views[at] = views[at][count:]


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
