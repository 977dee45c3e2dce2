"""A run of `axl rl` in a process of its own, observed through its log files, whose roles can be killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from axlearn_like.run.child_group import ChildGroup
from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail

ROOT = Path(__file__).resolve().parents[3]
DRIVER, COMMAND, RAYLET = "driver", "command", "raylet"
_WHOLE = (COMMAND, RAYLET)  # which take roles with them
PATIENCE_S = 900.0  # limit of a role's return on a busy machine


class RunFailed(RuntimeError):
    """The end of the run or a timeout; the message has the condition that was awaited, and the run's output."""


class WatchedRun:
    """A run whose `events.jsonl` and `metrics.jsonl` are followed; injected faults are logged as events of `chaos`.

    No process of it is left running at the end of the `with` block, nor after the end of this process.
    """

    def __init__(
        self,
        run_dir: Path,
        experiment: str,
        arguments: Sequence[str] = (),
        *,
        environ: Mapping[str, str] | None = None,
        wrap: Sequence[str] = (),
    ):
        """Prepare the command; `wrap` is a command that runs it, for example in a file system of its own."""
        self.run_dir = run_dir
        words = [sys.executable, "-m", "tools.cli", "rl", experiment, "--run-dir", str(run_dir), *arguments]
        self._command = [*wrap, *words]
        here = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._environ = {**os.environ, "PYTHONPATH": here, **(environ or {})}
        self._said = run_dir.with_name(f"{run_dir.name}.out")
        self._said.write_text("")
        self._tails = {name: JsonlTail(run_dir / f"{name}.jsonl") for name in ("events", "metrics")}
        self.events: list[dict[str, Any]] = []
        self.process: ChildGroup | None = None
        self._elastic: list[ChildGroup] = []
        self.step = 0  # updates completed, by the newest row of the metrics

    def __enter__(self) -> "WatchedRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self) -> None:
        """Start the command, or start it again."""
        with open(self._said, "ab") as output:
            self.process = ChildGroup(
                self._command,
                cwd=ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                grace=60.0,  # time to save
            )

    def said(self) -> str:
        """Return the output of all starts."""
        return self._said.read_text(errors="replace")

    def look(self) -> None:
        """Read the rows written since the last call."""
        self.events += self._tails["events"].new_rows()
        for row in self._tails["metrics"].new_rows():
            if row["phase"] == "rl":
                self.step = row["step"]

    def count(self, event: str, role: str | None = None) -> int:
        """Return the number of events of a kind so far."""
        return sum(row["event"] == event and role in (None, row["role"]) for row in self.events)

    def pid(self, role: str) -> int:
        """Return the process id of the role's newest process; of two raylets, the one that began first."""
        if role in _WHOLE:
            assert self.process is not None
            return next((one.pid for one in self._raylets() if role == RAYLET), self.process.pid)
        if role == DRIVER:
            return next(row["pid"] for row in reversed(self.events) if row["event"] == "session")
        return next(r["pid"] for r in reversed(self.events) if r["event"] == "start" and r["role"] == role)

    def _raylets(self) -> list[psutil.Process]:
        assert self.process is not None
        tree = psutil.Process(self.process.pid).children(recursive=True)
        return sorted((one for one in tree if one.name() == RAYLET), key=psutil.Process.create_time)

    def _lives(self, role: str) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid(role)).status() != psutil.STATUS_ZOMBIE
        return False

    def cpu(self, role: str) -> float:
        """Return the CPU seconds that the newest process of a role has used so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(self.pid(role)).cpu_times()
            return times.user + times.system
        return 0.0

    def roles(self) -> list[str]:
        """Return the roles that have started, spares aside."""
        return sorted({row["role"] for row in self.events if row["event"] == "start" and "-spare-" not in row["role"]})

    def prepared(self, spares: Sequence[str]) -> bool:
        """Return True if these spares wait to take over."""
        session = max((n for n, row in enumerate(self.events) if row["event"] == "session"), default=0)
        rows = [row for row in self.events[session:] if row["event"] in ("ready", "takeover")]
        last = {row.get("spare", row["target"]): row["event"] for row in rows}
        return all(last.get(spare) == "ready" for spare in spares)

    def signal(self, role: str, signum: int, event: str, **fields: Any) -> bool:
        """Send a signal to a role's process and log it; False if there is no such process at the moment."""
        pid = self.pid(role)
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return False
        self.note(event, target=role, pid=pid, step=self.step, **fields)
        return True

    def kill(self, role: str) -> bool:
        """Kill a role by SIGKILL, and log the newest checkpoint on disk."""
        return self.signal(role, signal.SIGKILL, "kill", saved=self.saved())

    def kill_and_wait(self, *targets: str) -> None:
        """Kill these roles at once by SIGKILL, restart a killed command, and wait for all roles and an update.

        Raises:
            RunFailed: a target had ended by itself, or was not back in time.
        """
        self.look()
        beside = RAYLET in targets and len(self._raylets()) > 1  # another raylet lives on, with its roles
        whole = ({DRIVER, *_WHOLE} & {*targets}) - ({RAYLET} if beside else set())
        waits = [(t, self.count("start", t)) for t in targets if t not in whole and t != RAYLET]
        replaced = lambda: sum(self.count("start", f"{RAYLET}-{n}") for n in range(2))  # noqa: E731
        raylets = replaced() + beside
        sessions = self.count("session") + len(whole)
        if {*_WHOLE} & whole:  # every role starts again
            waits += [(role, self.count("start", role)) for role in self.roles() if role not in targets]
        for target in targets:
            if not self.kill(target):
                raise RunFailed(f"{target} (pid {self.pid(target)}) ended by itself; the run said:\n{self._tail()}")
        if COMMAND in targets:
            assert self.process is not None
            self.process.wait()
            self.start()
        if whole:
            self.wait_for("the next session", lambda: self.count("session") >= sessions, PATIENCE_S)
        self.wait_for("the next raylet", lambda: replaced() >= raylets, PATIENCE_S)
        self.wait_for("all roles live", lambda: not beside or all(map(self._lives, self.roles())), PATIENCE_S)
        for role, before in waits:
            self.wait_for(f"{role} is back", lambda r=role, n=before: self.count("start", r) > n, PATIENCE_S)
        back = [role for role, _ in waits] + [DRIVER] * bool(whole)
        self.note("back", target=" and ".join(targets), cpu=round(sum(map(self.cpu, back)), 3))
        self.wait_for_update(f"an update with {' and '.join(targets)} back")

    def join(self, name: str, wrap: Sequence[str] = ()) -> None:
        """Start an elastic worker, and wait until the run uses its rollouts; `wrap`: a command that runs it."""
        command = [*wrap, sys.executable, "-m", "tools.cli", "worker", str(self.run_dir), "--name", name]
        with open(self._said, "ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            self._elastic.append(ChildGroup(command, cwd=ROOT, env=self._environ, **streams))
        self.wait_for(f"the first rollouts of {name}", lambda: self.count("joined", name) > 0, PATIENCE_S)

    def freeze_with_lease(self, worker: str) -> None:
        """Stop a worker by SIGSTOP while it has rollouts that it has not submitted."""
        while True:
            self.wait_for(f"a lease of {worker}", lambda: self._draws_last(worker), PATIENCE_S)
            os.kill(self.pid(worker), signal.SIGSTOP)
            self.look()
            if self._draws_last(worker):
                return
            os.kill(self.pid(worker), signal.SIGCONT)

    def lose(self, worker: str, signum: int) -> None:
        """Kill or stop an elastic worker that holds a lease; wait until another has that, and for an update.

        Raises:
            RunFailed: not in time.
        """
        self.freeze_with_lease(worker)
        assert self.signal(worker, signum, "kill", saved=self.saved())
        self.wait_for_lost_lease(worker)
        self.note("back", target=worker, cpu=0.0)
        self.wait_for_update(f"an update without {worker}")

    def leave(self, worker: str) -> None:
        """End an elastic worker, also a stopped one, and wait for it."""
        for signum in (signal.SIGTERM, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(worker), signum)
        self.wait_for_worker(PATIENCE_S)

    def wait_for_worker(self, timeout: float) -> int:
        """Wait for the end of the elastic worker that joined last, and return its exit status."""
        return self._elastic[-1].wait(timeout)

    def wait_for_lost_lease(self, worker: str) -> None:
        """Wait until a lease of this worker has been taken from it."""
        taken = ("lease_expired", worker)
        lost = lambda: any((row["event"], row.get("worker")) == taken for row in self.events)  # noqa: E731
        self.wait_for(f"the lease of {worker} goes to another", lost, PATIENCE_S)

    def _draws_last(self, worker: str) -> bool:
        """Return True if the last that a worker has done is drawing."""
        mine = (row["event"] for row in reversed(self.events) if row["role"] == worker)
        return next((event for event in mine if event in ("generate", "score")), None) == "generate"

    def wait_for_update(self, what: str) -> None:
        """Wait for an update of the trainer that is not done yet."""
        self.look()
        updates = self.count("update")
        self.wait_for(what, lambda: self.count("update") > updates, PATIENCE_S)

    def saved(self) -> int:
        """Return the step of the newest completed checkpoint, 0 if there is none."""
        names = (path.name for path in (self.run_dir / "checkpoints" / "rl").glob("*") if path.name.isdigit())
        return max(map(int, names), default=0)

    def note(self, event: str, **fields: Any) -> None:
        """Log an event of `chaos` among those of the run."""
        EventLog(self.run_dir / "events.jsonl").append("chaos", event, **fields)

    def wait_for(self, what: str, done: Callable[[], bool], timeout: float, *, alive: bool = True) -> None:
        """Read new rows until `done()`.

        Raises:
            RunFailed: not within `timeout` seconds, or the command ended before although it should be `alive`.
        """
        end = time.monotonic() + timeout
        while True:
            self.look()
            if done():
                return
            if alive and self.process is not None and self.process.poll() is not None:
                status = self.process.returncode
                raise RunFailed(f"the run ended with status {status} before {what}; it said:\n{self._tail()}")
            if time.monotonic() > end:
                raise RunFailed(f"{what}: not within {timeout:g} s, at update {self.step}; it said:\n{self._tail()}")
            time.sleep(0.05)

    def stop(self, timeout: float = 120.0) -> int:
        """Send SIGTERM to the command, wait until it has saved, and return its exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.wait_for_end(timeout)

    def wait_for_end(self, timeout: float) -> int:
        """Wait for the command to end and return its exit status."""
        process = self.process
        assert process is not None
        self.wait_for("the end of the command", lambda: process.poll() is not None, timeout, alive=False)
        self.look()
        return process.returncode

    def end(self) -> None:
        """Kill the command, the processes that it started, and those left by its earlier starts."""
        for worker in self._elastic:
            worker.kill_group()
        found: dict[int, psutil.Process] = {}
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(self.process.pid)
                found |= {p.pid: p for p in (*parent.children(recursive=True), parent)}
        groups = {row["group"] for row in self.events if row["event"] == "session"}
        actors = {row["pid"] for row in self.events if row["event"] == "start" and "pid" in row}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                orphan = process.pid in actors and " ".join(process.cmdline()).startswith("ray::")
                orphan = orphan and process.ppid() == 1  # the process id may have been reused by another run
                if orphan or os.getpgid(process.pid) in groups:
                    found[process.pid] = process
        for process in found.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(list(found.values()), timeout=10.0)
        if self.process is not None:
            self.process.wait()

    def _tail(self) -> str:
        return "\n".join(self.said().splitlines()[-15:])
