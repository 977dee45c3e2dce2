"""The actors of one run, and the driver's watch over them.

Placement, restarts and logs are Ray's. The supervisor starts the roles, begins the loops of trainer and
workers again when their process died or left, kills a worker when asked to, reports long waits, and ends all actors at
the end of the run.
"""

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail
from mesh import UserError
from rl.experiment import RLExperiment
from rl.runtime.ray.actors import RemoteRole, RoleHost, result, server_names, trainer_names
from rl.runtime.ray.elastic_workers import advertise, withdraw
from rl.runtime.ray.fault_injection import FaultInjection, Say
from rl.runtime.ray.health import HealthMonitor
from rl.runtime.ray.trainer_group import TrainerGroup, What

DEATHS = 5  # of one role, without an update in between: then it is not bad luck
_WORKERS_LEAVE = 5.0  # seconds


class Supervisor:
    """Controller, parameter server, verifier, trainer and workers, in a process each or several."""

    def __init__(self, cfg: RLExperiment.Config, run: RunDirectory, say: Say):
        self._cfg, self._run, self._say = cfg, run, say
        self._log = EventLog(run.events_path)
        self._events = JsonlTail(run.events_path, from_end=True)
        self._metrics = JsonlTail(run.metrics_path)
        self._step = 0
        self._pids: dict[str, int] = {}  # of the roles that have started
        self._left: set[str] = set()  # those that went when they were asked to, and have not started again
        self._former: dict[str, str] = {}  # processes that are about to end
        self._deaths: dict[str, list[str]] = {}  # since the last update: why
        self._reported: set[str] = set()  # waits, since the last update
        self._kill = FaultInjection(cfg, run)
        self._token = secrets.token_hex(16)
        self._namespace = f"{run.path.name}-{self._token[:8]}"
        self._services = {name: self._start("parameter_server", name) for name in server_names(cfg)}
        self._services |= {kind: self._start(kind, kind) for kind in ("controller", "verifier")}
        self._loops = {name: self._start("trainer", name) for name in trainer_names(cfg)}
        self._group = TrainerGroup(dict(self._loops))
        for name in (f"worker-{i}" for i in range(cfg.workers)):
            self._loops[name] = self._start("worker", name)
        self._health = HealthMonitor({**self._services, **self._loops}, cfg.timeouts, self._log, say)
        self._waiting: dict[Any, tuple[str, What]] = {}

    @property
    def step(self) -> int:
        """Updates completed, as far as is known here."""
        return self._step

    def run(
        self,
        stop: Callable[[], bool],
        on_step: Callable[[int], None],
        preempted: Callable[[], bool],
        check: Callable[[], None] = lambda: None,
    ) -> int:
        """Watch until the trainer's loop returns. `check()` raises if Ray itself has died: all else follows from it."""
        for name in self._loops:
            self._begin(name)
        advertise(self._run, self._namespace)
        asked: float | None = None
        while True:
            if asked is None and stop():
                asked = time.monotonic()
                self._loops["trainer"].stop.remote()
            done, _ = ray.wait(list(self._waiting), timeout=0.25)
            check()
            self._read_logs()
            self._check_health()
            on_step(self._step)
            for reference in done:
                name, what = self._waiting.pop(reference)
                value = self._outcome(name, what, reference)
                if name == "trainer" and value is not None and (asked or value["step"] >= self._cfg.num_steps):
                    return value["step"]
                if name in self._group.names and value is None and asked:
                    return self._step  # it died before it could save: what was saved last is resumed
            if asked and preempted() and time.monotonic() > asked + self._cfg.timeouts.grace:
                self._say(f"the trainer was not done within timeouts.grace={self._cfg.timeouts.grace:g} s of SIGTERM")
                return self._step

    def close(self) -> None:
        """Stop the workers, then end all actors; nothing is left running."""
        withdraw(self._run)
        brief = self._cfg.timeouts.clone(restart=2.0)
        try:
            controller = RemoteRole("controller", self._services["controller"], brief, limit=5.0)
            controller.stop()
            give_up = time.monotonic() + _WORKERS_LEAVE
            while set(controller.status()["workers"]) - set(self._loops) and time.monotonic() < give_up:
                time.sleep(0.1)
            RemoteRole("verifier", self._services["verifier"], brief, limit=5.0).close()
        except (UserError, RayActorError):
            pass  # already gone
        for actor in [*self._loops.values(), *self._services.values()]:
            ray.kill(actor)
        self._read_logs()
        self._kill.end(self._say)

    def _start(self, kind: str, name: str) -> Any:
        most = 32 + 4 * self._cfg.workers if kind in ("controller", "parameter_server", "verifier") else 8
        remote: Any = ray.remote  # its annotations do not know the groups
        actor = remote(concurrency_groups={"health": 1}, max_concurrency=most)(RoleHost).options(
            name=name,
            namespace=self._namespace,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=self._home(kind, name),
            runtime_env={"env_vars": _environment(kind)},
        )
        return actor.remote(kind, name, str(self._run.path), self._token, self._cfg.timeouts.grace, self._namespace)

    def _home(self, kind: str, name: str) -> Any:
        """Places workers and trainer processes on the nodes in turn, and on another node when theirs is lost.

        Ray's own SPREAD strategy is random.
        """
        if kind not in ("trainer", "worker") or (kind == "trainer" and self._cfg.trainer.processes == 1):
            return "DEFAULT"
        nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
        index = int(name.removeprefix(kind).removeprefix("-") or 0) % len(nodes)
        return NodeAffinitySchedulingStrategy(nodes[index], soft=True)

    def _begin(self, name: str, incarnation: str = "") -> None:
        """The loop of a process that is there; of one of several of the trainer, as soon as all are."""
        self._left.discard(name)
        actor = self._loops[name]
        if name not in self._group.names:
            self._waiting[actor.run_worker.remote(self._services)] = (name, "loop")
        elif not self._group.several:
            self._waiting[actor.run_trainer.remote(self._services)] = (name, "loop")
        elif not incarnation:
            self._await_restart(name)
        elif self._group.came(name, incarnation):
            self._waiting[self._loops[self._group.leader].meeting_place.remote()] = (self._group.leader, "meeting")

    def _outcome(self, name: str, what: What, reference: Any) -> dict[str, Any] | None:
        """What a loop returned. If its process died or left, None: its restart is waited for and the loop begun again.

        Raises:
            UserError: what the loop raised, if a user can mend it. Others: the second time in a row.
        """
        try:
            value = result(reference)
        except Exception as error:
            self._note_end(name, what, error)
            return None
        if what == "loop":
            return self._note_return(name, value)
        if what == "meeting":
            self._group.begin()
            for member in self._group.names:
                loop = self._loops[member].run_trainer.remote(self._services, value)
                self._waiting[loop] = (member, "loop")
        elif value == self._former.get(name):
            self._await_restart(name)
        else:
            self._begin(name, value)
        return None

    def _note_return(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        """A loop has ended as it should; one that was asked to leave will be begun again."""
        if value["shutdown"]:
            self._former[name] = value["incarnation"]
            self._note_leave(name)
            self._start_again([name], [name])
        return value

    def _note_end(self, name: str, what: What, error: Exception) -> None:
        """A process does not answer, or its loop raised something; it is started again.

        Raises:
            The error, if it is not of a death, and nobody may hope that it comes once only.
        """
        if what != "loop":
            if not isinstance(error, RayActorError):
                raise error
            self._group.lost(name)
            return self._await_restart(name)
        dead = self._group.dead(name, error) if name in self._group.names else []
        if dead:
            for one in (first := self._group.first(dead)):
                self._note_loss(one, error)
            return self._start_again(first, dead)
        if isinstance(error, RayActorError):
            self._note_loss(name, error)
        elif isinstance(error, UserError):
            raise error
        else:
            self._note_failure(name, error)
        self._start_again([name], [name])

    def _start_again(self, first: list[str], dead: list[str]) -> None:
        """Wait for a process that has ended, to begin its loop again. If it is of the trainer, all of that end: `first`
        are those for whose sake, `dead` those that have by themselves.
        """
        if first[0] not in self._group.names:
            return self._await_restart(first[0])
        self._waiting = {r: waiting for r, waiting in self._waiting.items() if waiting[0] not in self._group.names}
        self._former |= self._group.scatter()
        for name in self._group.names:
            if name not in first:
                self._log.append("driver", "ended", target=name, cause=first[0])
            if name not in dead:
                ray.kill(self._loops[name], no_restart=False)
        for name in self._group.names:
            self._await_restart(name)

    def _await_restart(self, name: str) -> None:
        time.sleep(0.1)
        self._waiting[self._loops[name].incarnation.remote()] = (name, "restart")

    def _note_loss(self, name: str, error: Exception) -> None:
        self._read_logs()
        if name in self._left:
            return self._note_leave(name)
        self._log.append("driver", "died", target=name)
        self._note_death(name, "died", error)
        if name != self._kill.target:
            self._say(f"{self._process(name)} died at update {self._step}; starting {self._again(name)}")

    def _note_failure(self, name: str, error: Exception) -> None:
        """Its loop raised what no user can mend. Once that may be the machine's fault."""
        why = repr(getattr(error, "cause", error))  # without Ray's wrapping
        self._log.append("driver", "died", target=name, error=why)
        if why in self._deaths.get(name, []):
            raise error
        self._note_death(name, why, error)
        self._say(f"{name} failed at update {self._step}; starting {self._again(name)}. {why}")
        if name in self._health.incarnations:
            self._former[name] = self._health.incarnations[name]
        ray.kill(self._loops[name], no_restart=False)

    def _note_death(self, name: str, why: str, error: Exception) -> None:
        deaths = self._deaths.setdefault(name, [])
        deaths.append(why)
        if len(deaths) >= DEATHS:
            raise UserError(
                f"{name} died {DEATHS} times without an update in between, at update {self._step}; "
                f"its output is in the logs of Ray's session. {error}"
            )
        if name not in self._group.names:  # if this is lost, the worker says so itself when it joins
            self._services["controller"].call.remote("release", (name, "worker died"), {})

    def _note_leave(self, name: str) -> None:
        self._say(f"{self._process(name)} left when asked to by SIGTERM; starting {self._again(name)}")

    def _process(self, name: str) -> str:
        return f"{name} (pid {self._pids.get(name, 'unknown')})"

    def _again(self, name: str) -> str:
        together = self._group.several and name in self._group.names
        return "all processes of the trainer again" if together else "it again"

    def _read_logs(self) -> None:
        """Take note of what the roles have written down."""
        for row in self._metrics.new_rows():
            if row["phase"] == "rl":
                self._deaths, self._step = {}, row["step"]
                self._reported.clear()
        for row in self._events.new_rows():
            self._read_event(row)
        if self._kill.due(self._step) and self._kill.name in self._pids:
            self._kill.do(self._pids[self._kill.name], self._loops[self._kill.name], self._step, self._log)

    def _check_health(self) -> None:
        """Take note of which processes live."""
        for name in self._health.look():
            if self._group.lost(name):  # before its loop began
                self._await_restart(name)
            elif name not in self._loops and name not in self._left:  # of loops their end tells
                self._log.append("driver", "died", target=name)

    def _read_event(self, row: dict[str, Any]) -> None:
        match row["event"]:
            case "start" if "pid" in row:
                self._pids[row["role"]] = row["pid"]
                self._left.discard(row["role"])
            case "shutdown":
                self._left.add(row["role"])
            case "waiting" if row["role"] != "driver" and row["what"] not in self._reported:
                self._reported.add(row["what"])
                self._say(f"waiting {row['seconds']:.0f} s for {row['what']} ({row['who']})")
            case "productive" if row["role"] not in self._loops:
                self._say(f"{row['role']} joined: its first rollouts came after {row['join_s']:.1f} s")
        self._kill.see(row, self._say)


def _environment(kind: str) -> dict[str, str]:
    """A role without device work must not open the accelerator; JAX processes share the cores of a machine."""
    names = ("JAX_PLATFORMS", "XLA_FLAGS", "AXL_COMPILATION_CACHE")
    inherited = {name: os.environ[name] for name in names if name in os.environ}
    if kind not in ("trainer", "worker"):
        inherited["JAX_PLATFORMS"] = "cpu"
    return inherited
