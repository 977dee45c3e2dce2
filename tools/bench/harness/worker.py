"""The runner's end of the step protocol: it starts a worker process and requests steps."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, override

from axlearn_like.run.child_group import ChildGroup
from axlearn_like.run.closing import Closing
from tools.bench.harness.processes import Command
from tools.bench.harness.protocol import STEP_FIELDS


class WorkerError(RuntimeError):
    """A worker that ended, hung or broke the protocol; the message ends with its last log lines."""


class StepWorker(Closing):
    """One system, warm in a process of its own; as a context manager it leaves no process running.

    Args:
        name: used in error messages.
        command: the program, its arguments and its whole environment.
        log: file for its standard error and everything that libraries print.
    """

    def __init__(self, name: str, command: Command, log: Path, cwd: Path):
        self.name = name
        self.log = log
        self._buffer = b""
        self._started = time.perf_counter()
        with log.open("wb") as stderr:
            self._process = ChildGroup(
                command.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(command.environ),
                cwd=cwd,
            )

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the first step to end.

        Returns:
            The worker's ready line, and `start_s`: wall seconds since the process was started.

        Raises:
            WorkerError: it ended, or was not ready in time.
        """
        message = self._receive(timeout_s, ("ready", "first_step_s", "version", "parameters"))
        return message | {"start_s": time.perf_counter() - self._started}

    def step(self, timeout_s: float, fields: Sequence[str] = STEP_FIELDS) -> dict[str, float]:
        """Request exactly one step and return its figures.

        Args:
            timeout_s: how long it may take.
            fields: which figures the worker must report.

        Raises:
            WorkerError: it ended, the step did not end in time, or a figure is missing.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._receive(timeout_s, fields)

    @override
    def close(self, grace_s: float = 5.0) -> None:
        """End the worker: request it to quit, then kill its whole process group."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()  # a closed input means quit
            self._process.wait(grace_s)
        self._process.kill_group()
        self._process.stdout.close()

    def _receive(self, timeout_s: float, fields: Sequence[str]) -> dict[str, Any]:
        line = self._read_line(timeout_s)
        try:
            message = json.loads(line)
            missing = [field for field in fields if field not in message]
        except (ValueError, TypeError):
            missing = list(fields)
        if missing:
            raise WorkerError(f"{self.name}: expected a line with {missing}, got {line!r}")
        return message

    def _read_line(self, timeout_s: float) -> str:
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                raise WorkerError(f"{self.name}: no reply within {timeout_s:g} s{self._log_tail()}")
            chunk = os.read(source, 1 << 16)
            if not chunk:
                raise self._ended()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    def _ended(self) -> WorkerError:
        try:
            status: object = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            status = "unknown: its output is closed but it runs"
        return WorkerError(f"{self.name}: ended with status {status}{self._log_tail()}")

    def _log_tail(self, lines: int = 8) -> str:
        text = self.log.read_text(errors="replace").strip()
        if not text:
            return f" (log {self.log} is empty)"
        return "\n" + "\n".join(text.splitlines()[-lines:]) + f"\n(log: {self.log})"
