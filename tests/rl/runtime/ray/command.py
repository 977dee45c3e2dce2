"""`axl rl` as a child process in its own process group, as a shell starts it, and the processes that it leaves."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil

from axlearn_like.run.metrics import read_rows

ROOT = Path(__file__).parents[4]


class Command:
    """A run from the command line, which is always ended with the `with` block."""

    def __init__(self, run_dir: Path, experiment: str, *arguments: str):
        self.run_dir = run_dir
        command = [sys.executable, "-m", "tools.cli", "rl", f"tests.rl.runtime.ray.experiments:{experiment}"]
        self._output = open(run_dir.with_name(f"{run_dir.name}.{time.monotonic_ns()}.out"), "w+")
        self.process = subprocess.Popen(
            [*command, "--run-dir", str(run_dir), *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._family: dict[int, psutil.Process] = {}
        self._session = ""  # Ray's
        self.peak_memory = 0  # bytes that the command has held at once, libraries left out; known after `wait`

    def __enter__(self) -> "Command":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (psutil.Process(self.process.pid), *self.left()) if self.process.poll() is None else self.left():
            process.kill()
        self.process.wait()
        if error is not None:
            print(self.output())
        self._output.close()

    def wait_for_updates(self, count: int, phase: str = "rl") -> None:
        """Wait until `count` updates of this run are done."""
        path = self.run_dir / "metrics.jsonl" if phase == "rl" else self.run_dir / "warm_start" / "metrics.jsonl"
        self._wait_until(lambda: any(row["step"] >= count for row in read_rows(path) if row["phase"] == phase))

    def interrupt(self) -> None:
        """Send Ctrl-C, like a terminal to the whole process group."""
        self._look()
        os.killpg(self.process.pid, signal.SIGINT)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the command alone."""
        self._look()
        self.process.send_signal(signum)

    def wait(self, timeout: float = 240.0) -> int:
        """Wait for the exit status, and look at the command's memory, too."""
        give_up = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < give_up:
            self.peak_memory = max(self.peak_memory, _memory(self.process.pid))
            time.sleep(0.05)
        return self.process.wait(0)

    def output(self) -> str:
        """Return all that it printed."""
        self._output.seek(0)
        return self._output.read()

    def left(self) -> list[psutil.Process]:
        """Return live processes that it started, or that belong to its Ray session or its process group."""
        found = {p.pid: p for p in self._family.values() if p.is_running()}
        for process in psutil.process_iter():
            try:
                mine = self._session and self._session in " ".join(process.cmdline())
                if mine or (process.pid != self.process.pid and os.getpgid(process.pid) == self.process.pid):
                    found[process.pid] = process
            except (psutil.Error, ProcessLookupError):
                continue
        return [p for p in found.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def _look(self) -> None:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self._family[process.pid] = process
            try:
                session = re.search(r"session_[\d_-]+", " ".join(process.cmdline()))
            except psutil.Error:
                continue
            self._session = self._session or (session[0] if session else "")

    def _wait_until(self, condition: Callable[[], bool], timeout: float = 240.0) -> None:
        give_up = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output()}"
            assert time.monotonic() < give_up, self.output()
            time.sleep(0.05)


def _memory(process: int) -> int:
    """Return the bytes of its own that a process holds; 0 if it has ended.

    Libraries are left out: how much of them is mapped depends on what the kernel has cached, from 180 to 290 MB here.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
