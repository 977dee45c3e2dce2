"""The pool's end of one verification process: starting it, its link, its board, and its end."""

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

from rl.verification.shared_buffer import Board
from rl.verification.worker import pack

__all__ = ["WorkerProcess"]

_LENGTH = struct.Struct("<Q")


class WorkerProcess:
    """A fresh Python process: a fork of the caller would share its devices and threads.

    Sending and receiving never block: the pool's one thread waits for all of its workers at once.
    """

    def __init__(self, scorer_config: Any, *, capacity: int, memory_mb: int):
        self.board = Board.create(capacity)
        self.link, theirs = socket.socketpair()
        self.link.setblocking(False)
        self._stderr = tempfile.TemporaryFile()
        self._unsent = bytearray(pack(scorer_config))
        self._received = bytearray()
        self.since = time.monotonic()
        """When the process was started, or given its last chunk."""
        arguments = [theirs.fileno(), self.board.fd, capacity, os.getpid(), memory_mb]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl.verification.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(), self.board.fd),
                env=_environment(),
                start_new_session=True,  # away from the terminal's Ctrl-C, and one group to kill
            )
        self.pid = self._process.pid

    def send(self, message: Any) -> None:
        """Queues a message; `flush` moves it."""
        self._unsent += pack(message)
        self.flush()

    def flush(self) -> bool:
        """Sends what the link takes now; whether something is left. Death shows on `receive`."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                sent = self.link.send(self._unsent)
                del self._unsent[:sent]
        return bool(self._unsent)

    def receive(self) -> Iterable[Any]:
        """The messages that have arrived; raises EOFError when the process has closed its end."""
        ended = False
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = self.link.recv(1 << 16)
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
        """Kills and reaps the process and what it started; its exit code (-9 for SIGKILL)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self.link.close()
        return code

    def last_words(self) -> str:
        """The end of its stderr up to the moment when its scorer was ready."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 2000))
        return self._stderr.read().decode("utf-8", "replace").strip()

    def release(self) -> None:
        """Gives the board and the files back, after `kill`."""
        self.board.close()
        self._stderr.close()


def _environment() -> dict[str, str]:
    """Ours, with our import path, no accelerator, one thread, and the same hashes everywhere."""
    path = [entry or os.getcwd() for entry in sys.path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONHASHSEED": "0",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
