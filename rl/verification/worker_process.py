"""Handle of one verification process: start, connection, shared buffer and end."""

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

from rl.verification.shared_buffer import ResultBuffer
from rl.verification.worker import pack

__all__ = ["WorkerProcess"]

_LENGTH = struct.Struct("<Q")


class WorkerProcess:
    """A fresh Python process: a fork of the caller would share its devices and threads.

    Sending and receiving never block: the pool's one thread waits for all of its workers at once.
    """

    def __init__(self, scorer_config: Any, *, capacity: int, memory_mb: int):
        self.results = ResultBuffer.create(capacity)
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self._stderr = tempfile.TemporaryFile()
        self._unsent = bytearray(pack(scorer_config))
        self._received = bytearray()
        self.since = time.monotonic()
        """When the process was started, or given its last chunk."""
        arguments = [theirs.fileno(), self.results.fd, capacity, os.getpid(), memory_mb]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl.verification.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(), self.results.fd),
                env=_environment(),
                start_new_session=True,  # away from the terminal's Ctrl-C, and one group to kill
            )
        self.pid = self._process.pid

    def send(self, message: Any) -> None:
        """Queue a message and send as much of it as the connection takes."""
        self._unsent += pack(message)
        self.flush()

    def flush(self) -> bool:
        """Send what the connection takes now; return True if something is left. `receive` reports a death."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                sent = self.connection.send(self._unsent)
                del self._unsent[:sent]
        return bool(self._unsent)

    def receive(self) -> Iterable[Any]:
        """Return the messages that have arrived; raises EOFError when the process has closed its end."""
        ended = False
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = self.connection.recv(1 << 16)
                except ConnectionResetError:
                    data = b""
                if not data:
                    ended = True
                    break
                self._received += data
        messages = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(pickle.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        if ended and not messages:
            raise EOFError
        return messages

    def kill(self) -> int:
        """Kill and reap the process and its children; return its exit code (-9 for SIGKILL)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self.connection.close()
        return code

    def stderr_tail(self) -> str:
        """Return the end of what it wrote to stderr until its scorer was ready."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 2000))
        return self._stderr.read().decode("utf-8", "replace").strip()

    def release(self) -> None:
        """Close the shared buffer and the files, after `kill`."""
        self.results.close()
        self._stderr.close()


def _environment() -> dict[str, str]:
    """Environment of this process, with its import path, no accelerator, one thread, and the same hashes everywhere."""
    path = [entry or os.getcwd() for entry in sys.path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONHASHSEED": "0",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
