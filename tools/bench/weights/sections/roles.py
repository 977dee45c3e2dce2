"""Processes of the parameter server, a trainer and workers, driven by requests."""

import contextlib
import json
import subprocess
from types import TracebackType
from typing import Any, Self

from tools.bench.harness.interleave import our_command
from tools.bench.transports.yardsticks import ROOT


class Process:
    """A process that serves one request at a time: a line of JSON each way.

    Args:
        kind: a class of `role.py`.
        options: of that class.
    """

    def __init__(self, kind: str, **options: Any):
        command = our_command("tools.bench.weights.sections.role")
        self._process = subprocess.Popen(
            [*command.argv, kind, json.dumps(options)],
            cwd=ROOT,
            env=command.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.kind = kind
        self.ready = self._reply()

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Send a request and return its answer."""
        self.tell(what, **fields)
        return self.answer()

    def tell(self, what: str, **fields: Any) -> None:
        """Send a request; `answer` waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, fields]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the last request."""
        return self._reply()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all threads so far."""
        return self.ask("spent")["cpu_s"]

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the {self.kind} ended with status {self._process.wait(30)}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()  # it ends by itself and frees its segments
            self._process.wait(30)
        self._process.kill()
        self._process.wait()
