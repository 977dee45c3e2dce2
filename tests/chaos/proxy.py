"""A TCP proxy that injects faults into its connections, by a list: one entry a connection, then none."""

import contextlib
import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Literal

FaultKind = Literal["none", "reset", "cut", "throttle", "silence", "refuse"]


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionFault:
    """The fault of one connection.

    `reset` (with RST) and `cut` (with FIN) end it after `nbytes` in the given direction; `throttle` forwards them in
    small portions with pauses; `silence` accepts everything and never answers; `refuse` ends it at once.
    """

    kind: FaultKind = "none"
    direction: Literal["up", "down"] = "down"
    nbytes: int = 0


class Proxy:
    """A listener on loopback in front of a server on loopback; a context manager."""

    def __init__(self, port: int, faults: Iterable[ConnectionFault] = (), rate: float | None = None):
        """`rate`: bytes a second that all connections together bring from the server; None: no limit."""
        self._port, self._faults = port, iter(faults)
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            self.connections += 1
            fault = next(self._faults, ConnectionFault())
            self._open.append(client)
            if fault.kind == "refuse":
                _reset(client)
                continue
            server = socket.create_connection(("127.0.0.1", self._port))
            self._open.append(server)
            for direction, source, target in (("up", client, server), ("down", server, client)):
                threading.Thread(target=self._pump, args=(fault, direction, source, target), daemon=True).start()

    def _pump(self, fault: ConnectionFault, direction: str, source: socket.socket, target: socket.socket) -> None:
        mine, passed = fault.direction == direction, 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096 if self._rate is None else 1 << 16):
                if fault.kind == "silence" and direction == "down":
                    continue
                if mine and fault.kind in ("reset", "cut") and passed + len(data) > fault.nbytes:
                    target.sendall(data[: fault.nbytes - passed])
                    for one in (source, target):
                        _reset(one) if fault.kind == "reset" else one.shutdown(socket.SHUT_RDWR)
                    return
                if mine and fault.kind == "throttle":
                    time.sleep(0.005)
                if self._rate is not None and direction == "down":
                    time.sleep(self._wait(len(data) / self._rate))
                target.sendall(data)
                passed += len(data)
            target.shutdown(socket.SHUT_WR)

    def _wait(self, seconds: float) -> float:
        """Take so many seconds of the link, and return how long to wait until they are over."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + seconds
            return max(0.0, self._free - time.monotonic())


def _reset(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
