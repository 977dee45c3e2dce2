"""Every role in a process of its own, as Ray actors; Ray is started inside the command unless a cluster is named.

Placement, restarts and logs are Ray's. This file starts the roles, watches the loops of trainer and workers and begins
them again when their process died, kills a worker when the experiment asks for it, and takes all down at the end.
"""

import os
import secrets
import signal
import time
from collections.abc import Callable
from typing import Any, Literal

import psutil
import ray
from ray.exceptions import RayActorError

from axlearn_like.row_tail import RowTail
from axlearn_like.run_directory import EventLog, RunDirectory
from mesh import UserError
from rl.experiment import RLExperiment
from rl.runtime.ray_actors import RemoteRole, RoleHost, result
from rl.runtime.ray_session import ray_session

DEATHS = 5  # of one role, without an update in between: then it is not bad luck

Say = Callable[[str], None]


def run_ray(
    experiment: RLExperiment,
    run: RunDirectory,
    stop: Callable[[], bool],
    on_step: Callable[[int], None],
    say: Say = print,
) -> int:
    """Update until the last step or until `stop()`; returns the steps completed."""
    if not os.environ.get("RAY_ADDRESS"):
        end_leftovers(run)
        EventLog(run.events_path).append("driver", "session", pid=os.getpid(), group=os.getpgid(0))
    with ray_session():
        fleet = Fleet(experiment.cfg, run, say)
        try:
            return fleet.run(stop, on_step)
        finally:
            fleet.close()


class Fleet:
    """The actors of one run."""

    def __init__(self, cfg: RLExperiment.Config, run: RunDirectory, say: Say):
        self._cfg, self._run, self._say = cfg, run, say
        self._log = EventLog(run.events_path)
        self._events = RowTail(run.events_path, from_end=True)
        self._metrics = RowTail(run.metrics_path)
        self._step = 0
        self._pids: dict[str, int] = {}  # of the roles that have started
        self._deaths: dict[str, int] = {}  # since the last update
        self._kill = _Kill(cfg, run)
        self._token = secrets.token_hex(16)
        self._peers = {
            "server": self._start("parameter_server", "parameter-server"),
            "controller": self._start("controller", "controller"),
            "verifier": self._start("verifier", "verifier"),
        }
        self._loopers = {"trainer": self._start("trainer", "trainer")}
        for name in (f"worker-{i}" for i in range(cfg.workers)):
            self._loopers[name] = self._start("worker", name)
        self._controller = RemoteRole("controller", self._peers["controller"])
        self._waiting: dict[Any, tuple[str, Literal["loop", "restart"]]] = {}

    def run(self, stop: Callable[[], bool], on_step: Callable[[int], None]) -> int:
        """Watch until the trainer's loop returns."""
        for name in self._loopers:
            self._begin(name)
        asked = False
        while True:
            if stop() and not asked:
                asked = True
                self._loopers["trainer"].stop.remote()
            done, _ = ray.wait(list(self._waiting), timeout=0.25)
            self._look()
            on_step(self._step)
            for reference in done:
                name, what = self._waiting.pop(reference)
                outcome = self._outcome(name, what, reference)
                if outcome is None and asked and name == "trainer":
                    return self._step  # it died before it could save: what was saved last is resumed
                if name == "trainer" and what == "loop" and outcome is not None:
                    return outcome[0]

    def close(self) -> None:
        """Stop the workers, then end all actors; nothing is left running."""
        try:
            RemoteRole("controller", self._peers["controller"], patience=2.0, limit=5.0).stop()
            RemoteRole("verifier", self._peers["verifier"], patience=2.0, limit=5.0).close()
        except (UserError, RayActorError):
            pass  # already gone
        for actor in [*self._loopers.values(), *self._peers.values()]:
            ray.kill(actor)
        self._look()
        self._kill.end(self._say)

    def _start(self, kind: str, name: str) -> Any:
        actor = ray.remote(RoleHost).options(
            name=f"{name}-{self._run.path.name}-{self._token[:8]}",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=32,
            runtime_env={"env_vars": _environment(kind)},
        )
        return actor.remote(kind, name, str(self._run.path), self._token)

    def _begin(self, name: str) -> None:
        actor = self._loopers[name]
        loop = actor.run_trainer if name == "trainer" else actor.run_worker
        self._waiting[loop.remote(self._peers)] = (name, "loop")

    def _outcome(self, name: str, what: str, reference: Any) -> tuple[Any] | None:
        """What a loop returned, or None if its actor died: then its restart is waited for, and the loop begun again."""
        try:
            value = result(reference)
        except RayActorError as error:
            if what == "loop":
                self._note_death(name, error)
            else:
                time.sleep(0.1)
            self._waiting[self._loopers[name].pid.remote()] = (name, "restart")
            return None
        if what == "restart":
            self._begin(name)
        return (value,)

    def _note_death(self, name: str, error: RayActorError) -> None:
        self._log.append("driver", "died", target=name)
        self._deaths[name] = self._deaths.get(name, 0) + 1
        if self._deaths[name] >= DEATHS:
            raise UserError(
                f"{name} died {DEATHS} times without an update in between, at update {self._step}; "
                f"its output is in the logs of Ray's session. {error}"
            )
        if name != self._kill.target:
            self._say(f"{name} (pid {self._pids.get(name, 'unknown')}) died at update {self._step}; starting it again")
        if name != "trainer":
            self._controller.release(name, "worker died")

    def _look(self) -> None:
        """Take note of what the roles have written down."""
        for row in self._metrics.new_rows():
            if row["phase"] == "rl":
                self._deaths, self._step = {}, row["step"]
        for row in self._events.new_rows():
            if row["event"] == "start" and "pid" in row:
                self._pids[row["role"]] = row["pid"]
            self._kill.see(row, self._say)
        if self._kill.due(self._step) and self._kill.name in self._pids:
            self._kill.do(self._pids[self._kill.name], self._loopers[self._kill.name], self._step, self._log)


class _Kill:
    """The killed worker that the experiment asks for: once in a run, and how long until it is replaced."""

    def __init__(self, cfg: RLExperiment.Config, run: RunDirectory):
        self.name = f"worker-{cfg.workers - 1}"
        self.target: str | None = None  # its name while it is killed and not yet replaced
        share = cfg.kill_worker_after if cfg.workers else None
        self._at = None if share is None else max(1, round(share * cfg.num_steps))
        if any(row["event"] == "kill" for row in RowTail(run.events_path).new_rows()):
            self._at = None
        self._words, self._time, self._started = "", 0.0, False

    def due(self, step: int) -> bool:
        return self._at is not None and step >= self._at

    def do(self, pid: int, actor: Any, step: int, log: EventLog) -> None:
        self._at, self.target = None, self.name
        self._words, self._time = f"killed {self.name} (pid {pid}) at update {step}", time.time()
        log.append("driver", "kill", target=self.name, pid=pid, step=step)
        if os.environ.get("RAY_ADDRESS"):
            ray.kill(actor, no_restart=False)  # its process may be on another machine
        else:
            os.kill(pid, signal.SIGKILL)

    def see(self, row: dict[str, Any], say: Say) -> None:
        """Replaced means: its successor has handed in rollouts."""
        if self.target is None or row["role"] != self.target or row["time"] < self._time:
            return
        self._started = self._started or row["event"] == "start"
        if self._started and row["event"] == "score":
            say(f"{self._words}; replaced after {row['time'] - self._time:.1f} s")
            self.target = None

    def end(self, say: Say) -> None:
        if self.target is not None:
            say(f"{self._words}; the updates were done before it was replaced")
            self.target = None


def end_leftovers(run: RunDirectory) -> None:
    """End what a driver that was killed has left: its actors would write into the same run.

    Actors end by themselves within seconds of the driver, Ray's agents within a minute; this is for the time before.
    """
    actors, groups = set(), set()
    for row in RowTail(run.events_path).new_rows():
        if row["event"] == "start" and "pid" in row:
            actors.add(row["pid"])
        elif row["event"] == "session":
            groups.add(row["group"])
    left = [process for process in psutil.process_iter() if _is_left(process, actors, groups)]
    _, alive = psutil.wait_procs(left, timeout=3.0)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=5.0)


def _is_left(process: psutil.Process, actors: set[int], groups: set[int]) -> bool:
    """A process of Ray's that was this run's, by its number or process group, and has lost its parent."""
    try:
        named = " ".join(process.cmdline()).startswith("ray::")
        mine = named and (process.pid in actors or os.getpgid(process.pid) in groups)
        parent = process.parent() if mine else None
        return mine and (parent is None or parent.name() != "raylet")
    except (psutil.Error, ProcessLookupError):
        return False


def _environment(kind: str) -> dict[str, str]:
    """A role without device work must not open the accelerator; JAX processes share the cores of a machine."""
    names = ("JAX_PLATFORMS", "XLA_FLAGS", "AXL_COMPILATION_CACHE")
    inherited = {name: os.environ[name] for name in names if name in os.environ}
    if kind not in ("trainer", "worker"):
        inherited["JAX_PLATFORMS"] = "cpu"
    return inherited
