"""The sandbox: programs and tests in boxes that are killed whole at their deadline."""

import contextlib
import os
import queue
import socket
import tempfile
from collections.abc import Sequence
from typing import Any, override

from axlearn_like.config import Configurable
from axlearn_like.run.closing import Closing
from rl.verification.sandbox.session import InterpreterSession, SessionHost
from rl.verification.sandbox.warm_process import Limits, Outcome, SandboxError, WarmProcess


class Sandbox(Closing, Configurable):
    """Runs Python that nobody trusts; thread-safe, with up to `processes` programs at once. `close` it, or use `with`.

    A program has no network, sees Python and the system's libraries and nothing else, writes to an empty TMPDIR of its
    own, and is killed with all that it has started at its deadline. At most `tasks * memory_mb + disk_mb` of memory are
    in its reach, and what pipes hold. Nothing of it is left to the next one.
    """

    class Config(Limits["Sandbox"]):
        processes: int = 1

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require_least(1, "processes")

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self._idle: queue.LifoQueue[WarmProcess | None] = queue.LifoQueue()
        for _ in range(cfg.processes):
            self._idle.put(None)  # started when it is needed
        self._closed = False
        self._isolation = ""
        self._sessions = SessionHost(cfg, cfg.processes)

    @property
    def isolation(self) -> str:
        """Isolation here: "namespaces, seccomp", "landlock, seccomp"; if that is allowed, "seccomp" or "none"."""
        if not self._isolation:
            self.run_script("", "")
        return self._isolation

    def run_script(self, source: str, stdin: str, *, deadline_s: float | None = None) -> Outcome:
        """Run a program on its standard input; exit status 0 passes (SandboxError: there is no sandbox)."""
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, "rb") as output, tempfile.TemporaryFile() as given:
            given.write(stdin.encode("utf-8", "replace"))
            given.seek(0)
            descriptors = [given.fileno(), write_end]
            with self._process() as process:
                try:
                    one = process.start("script", descriptors)
                finally:
                    os.close(write_end)
                return process.watch(one, {"source": source}, deadline_s or self.cfg.deadline_s, output)

    def run_tests(
        self,
        source: str,
        tests: str,
        *,
        prelude: str = "",
        names: Sequence[str] = (),
        deadline_s: float | None = None,
    ) -> Outcome:
        """Run tests on the functions that a source defines; they pass if they raise nothing.

        Arguments and results are data (numbers, text, lists, dicts ...): they travel between two boxes.

        Args:
            source: code that nobody trusts.
            tests: code that calls its functions.
            prelude: code that the tests need.
            names: the functions that the tests call; empty: all that the source defines and the tests use.
            deadline_s: wall-clock seconds, if not `cfg.deadline_s`.

        Raises:
            SandboxError: there is no sandbox.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs, self._process() as process:
            answer = process.start("serve", [theirs.fileno()])
            judge = process.start("judge", [ours.fileno()])
            theirs.close()
            ours.close()
            job = {"tests": tests, "prelude": prelude, "names": list(names)}
            process.give(answer, {"source": source})
            return process.watch(judge, job, deadline_s or self.cfg.deadline_s)

    def session(self) -> InterpreterSession:
        """Return an interpreter whose names live on from input to input; `close` it. It starts with its first input."""
        return InterpreterSession(self._sessions)

    @contextlib.contextmanager
    def _process(self) -> Any:
        process = self._idle.get()
        try:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if process is None:
                process = WarmProcess(self.cfg)
                self._isolation = process.isolation
            yield process
            process.clear()
        except BaseException:
            if process is not None:
                process.end()
            process = None
            raise
        finally:
            if process is not None and process.broken:
                process.end()
                process = None
            self._idle.put(process)

    @override
    def close(self) -> None:
        """End all processes, those of sessions too."""
        self._closed = True
        self._sessions.close()
        for _ in range(self.cfg.processes):
            if (process := self._idle.get()) is not None:
                process.end()
        for _ in range(self.cfg.processes):
            self._idle.put(None)
