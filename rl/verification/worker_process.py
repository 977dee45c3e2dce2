"""Handle of one verification process: start, connection, results and end."""

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
from collections.abc import Sequence
from typing import Any

from axlearn_like.config import reach, to_text
from axlearn_like.config.consent import VARIABLE as CONSENT
from axlearn_like.config.consent import passed_on
from axlearn_like.config.trusted_code import VARIABLE
from axlearn_like.run.scratch import make_scratch
from rl.protocol.messages import Score
from rl.verification.job_queue import Job
from rl.verification.rewards import NotAReward, check_terms, number
from rl.verification.scorers import Scorer
from rl.verification.wire import MalformedMessage, MessageReader, pack

# Variables that a process needs to find its code and to write text; no keys, tokens or addresses.
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_STATE_HOME")
_MODULE = re.compile(r"(?:^|\s)([A-Za-z_]\w*)[\w.]*:[A-Za-z_]\w*(?:\(\))?$", re.MULTILINE)


class WorkerProcess:
    """A fresh Python process: a fork of the caller would share its devices and threads.

    Sending and receiving never block: the verifier's one thread waits for all of its workers at once.

    Attributes:
        answers: how many are in its chunk.
        scores: those that have arrived.
        since: time at which it was started, or given its chunk.
        begun: time at which it began with the answer at hand, as far as is known; None: with none of its chunk.
    """

    def __init__(self, scorer_config: Scorer.Config, memory_mb: int):
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self._stderr = tempfile.TemporaryFile()
        text = to_text(scorer_config)
        self._scratch = str(make_scratch("verifier")) if scorer_config.confined() else ""
        self._unsent = bytearray(pack({"scorer": text, "scratch": self._scratch}))
        self._reader = MessageReader()
        self.answers, self.scores = 0, list[Score]()
        self.since = time.monotonic()
        self.begun: float | None = None
        arguments = [theirs.fileno(), os.getpid(), memory_mb]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl.verification.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(),),
                env={**_environment(text, scorer_config.environment()), CONSENT: passed_on(reach(scorer_config))},
                start_new_session=True,  # away from the terminal's Ctrl-C, and one group to kill
            )
        self.pid = self._process.pid

    def remove_scratch(self) -> None:
        """Remove the folder in which the process has put together a root of its own, and which it has left."""
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def begin(self, chunk: Sequence[Job]) -> None:
        """Queue a chunk for `flush`, and prepare for its results."""
        self.answers, self.scores = sum(len(job.texts) for job in chunk), []
        self.since, self.begun = time.monotonic(), None
        self._unsent += pack([(job.problem_id, job.texts, job.details) for job in chunk])

    def add(self, message: dict[str, Any]) -> None:
        """Take what the process says while it is at a chunk: that it has begun, and then results in order.

        Raises:
            MalformedMessage: it is neither, or there are more results than answers.
        """
        if self.begun is None:
            if "begun" not in message:
                raise MalformedMessage("a result of what was not begun")
        elif len(self.scores) == self.answers:
            raise MalformedMessage(f"more than {self.answers} results")
        else:
            self.scores.append(_score(message, time.monotonic() - self.since))
        self.begun = time.monotonic()

    def flush(self) -> bool:
        """Send what the connection takes now; return True if something is left. `receive` reports a death."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                sent = self.connection.send(self._unsent)
                del self._unsent[:sent]
        return bool(self._unsent)

    def receive(self) -> list[dict[str, Any]]:
        """Return messages that are there (BlockingIOError: none; EOFError: the end; MalformedMessage: no message)."""
        try:
            data = self.connection.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        return self._reader.feed(data)

    def kill(self) -> int:
        """Kill and reap the process and its children; return its exit code (-9 for SIGKILL)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()

    def stderr_tail(self) -> str:
        """Return the end of what it wrote to stderr until its scorer was ready."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 2000))
        return self._stderr.read().decode("utf-8", "replace").strip()

    def release(self) -> None:
        """Close the connection and the files, after `kill`."""
        self.remove_scratch()
        self.connection.close()
        self._stderr.close()


def _score(message: dict[str, Any], most: float) -> Score:
    """Return the score of a result, which may be a forged one and took so many seconds at most."""
    try:
        seconds = min(max(0.0, number(message.get("seconds"), "a process, as seconds,")), most)
        if message.get("status") != "ok":
            return Score(0.0, "error", seconds, str(message.get("error"))[:500])
        reward, terms = number(message.get("reward"), "a process"), check_terms(dict(message["terms"]))
    except (NotAReward, LookupError, TypeError, ValueError) as error:
        raise MalformedMessage(str(error)) from error
    return Score(reward, "ok", seconds, terms=tuple(terms.items()))


def _environment(scorer: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return a process's variables: import path, CPU, one thread, equal hashes, no secrets but `names`."""
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
