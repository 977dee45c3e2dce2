"""Handle of one verification process: start, connection, shared buffer and end."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from axlearn_like.config import reach, to_text
from axlearn_like.config.consent import VARIABLE as CONSENT
from axlearn_like.config.consent import passed_on
from axlearn_like.config.trusted_code import VARIABLE
from axlearn_like.run.scratch import make_scratch
from rl.verification.scorers import Scorer
from rl.verification.shared_buffer import ResultBuffer
from rl.verification.wire import MalformedMessage, MessageReader, pack

__all__ = ["WorkerProcess"]

# Of the environment, what a process needs to find its code and to write text; no keys, tokens or addresses.
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_STATE_HOME")
_MODULE = re.compile(r"(?:^|\s)([A-Za-z_]\w*)[\w.]*:[A-Za-z_]\w*(?:\(\))?$", re.MULTILINE)


class WorkerProcess:
    """A fresh Python process: a fork of the caller would share its devices and threads.

    Sending and receiving never block: the pool's one thread waits for all of its workers at once.
    """

    def __init__(self, scorer_config: Scorer.Config, *, capacity: int, memory_mb: int):
        self.results = ResultBuffer.create(capacity)
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self._stderr = tempfile.TemporaryFile()
        text = to_text(scorer_config)
        self._scratch = str(make_scratch("verifier")) if scorer_config.confined() else ""
        self._unsent = bytearray(pack({"scorer": text, "scratch": self._scratch}))
        self._reader = MessageReader()
        self.answers = 0
        """How many are in its chunk."""
        self.notes: dict[int, dict[str, Any]] = {}
        """Errors and terms of rows of the buffer, as the process tells them: not checked."""
        self.since = time.monotonic()
        """Time at which the process was started, or given its last chunk."""
        arguments = [theirs.fileno(), self.results.fd, capacity, os.getpid(), memory_mb]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl.verification.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(), self.results.fd),
                env={**_environment(text, scorer_config.environment()), CONSENT: passed_on(reach(scorer_config))},
                start_new_session=True,  # away from the terminal's Ctrl-C, and one group to kill
            )
        self.pid = self._process.pid

    def remove_scratch(self) -> None:
        """Remove the folder in which the process has put together a root of its own, and which it has left."""
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def begin(self, answers: int) -> None:
        """Prepare for the results of a chunk."""
        self.results.clear()
        self.notes.clear()
        self.answers, self.since = answers, time.monotonic()

    def add_note(self, note: dict[str, Any]) -> None:
        """Keep what the process says of a row."""
        row = note["row"]
        if type(row) is not int or not 0 <= row < self.answers:
            raise MalformedMessage(f"a note on row {row!r} of {self.answers}")
        self.notes[row] = note

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

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived.

        Raises:
            EOFError: the process has closed its end. MalformedMessage: it sent something else.
        """
        ended, messages = False, []
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = self.connection.recv(1 << 16)
                except ConnectionResetError:
                    data = b""
                if not data:
                    ended = True
                    break
                messages += self._reader.feed(data)
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
        self.remove_scratch()
        self.results.close()
        self._stderr.close()


def _environment(scorer: str, names: tuple[str, ...]) -> dict[str, str]:
    """Environment of a process: an import path, no accelerator, one thread, the same hashes everywhere, no secrets.

    Args:
        scorer: the text of its config, whose modules it may import.
        names: variables that the scorer asks for.
    """
    path = [entry or os.getcwd() for entry in sys.path]
    code = [os.environ.get(VARIABLE, ""), *sorted(set(_MODULE.findall(scorer)))]
    return {
        **{name: os.environ[name] for name in (*_INHERITED, *names) if name in os.environ},
        VARIABLE: os.pathsep.join(filter(None, code)),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONHASHSEED": "0",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
