"""A command of a launched process: its log, its exit status, and the signals that are passed on to it."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from axlearn_like.run.child_group import ChildGroup

STOPPED = 128 + signal.SIGTERM
USER_ERROR = 2
POLL = 0.2  # seconds
PIPE = 1.0  # seconds


class Child:
    """A command whose output goes to a log too, and which gets our SIGTERM."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path | None = None):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self._began = log, time.time()
        self.seconds = 0.0
        """Time from its start to its end."""
        self.offset = log.stat().st_size if log.exists() else 0
        """Number of bytes of the log that are of earlier attempts."""
        # A group of its own: a signal for the container's group would reach it twice.
        self._process = ChildGroup(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
        )
        assert self._process.stdout is not None
        self._copier = threading.Thread(target=_copy, args=(self._process.stdout, log), daemon=True)
        self._copier.start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process.poll() is None:
            self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, killing after `timeout`; record the status beside the log and return it."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # In turns: a signal that comes just before a wait begins is handled when that wait ends.
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL)
        self.kill()
        status = self._process.wait()
        self._copier.join(PIPE)  # a grandchild may keep the pipe open
        status = status if status >= 0 else 128 - status
        ended = time.time()
        self.seconds = ended - self._began
        record = {"status": status, "began": round(self._began, 3), "ended": round(ended, 3)}
        self.log.with_suffix(".exit.json").write_text(json.dumps(record) + "\n")
        return status


def _copy(source: BinaryIO, log: Path) -> None:
    with log.open("ab", buffering=0) as file:
        while part := os.read(source.fileno(), 1 << 16):
            file.write(part)
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()


class StopSignals:
    """True once SIGTERM or SIGINT has come; the child gets SIGTERM at once, and only once."""

    def __init__(self) -> None:
        self.requested = False
        self.child: Child | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        # A second one would interrupt the saving that the first has begun; platforms send several.
        first, self.requested = not self.requested, True
        if first and self.child is not None:
            self.child.terminate()


def run_command(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    stop: StopSignals,
    folder: Path | None = None,
    beside: threading.Thread | None = None,
) -> int:
    """Run a command to its end, in a folder, and a thread beside it; 143 where it was asked to stop."""
    stop.child = Child(command, log, environment, folder)
    if stop.requested:
        stop.child.terminate()
    if beside is not None:
        beside.start()
    status = stop.child.wait()
    return STOPPED if stop.requested and status != USER_ERROR else status
