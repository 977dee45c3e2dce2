"""The actors of one run, and the driver's watch over them.

Placement, restarts and logs are Ray's. The fleet starts the roles, begins the loops of trainer and workers again when
their process died or left, kills a worker when the experiment asks for it, tells what is waited for, and takes all down
at the end.
"""

import os
import secrets
import time
from collections.abc import Callable
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from axlearn_like.row_tail import RowTail
from axlearn_like.run_directory import EventLog, RunDirectory
from mesh import UserError
from rl.experiment import RLExperiment
from rl.runtime.guests import invite, uninvite
from rl.runtime.planned_kill import PlannedKill, Say
from rl.runtime.pulse import Pulse
from rl.runtime.ray_actors import RemoteRole, RoleHost, result, server_names

DEATHS = 5  # of one role, without an update in between: then it is not bad luck
_GUESTS_LEAVE = 5.0  # seconds


class Fleet:
    """Controller, parameter server, verifier, trainer and workers, in a process each."""

    def __init__(self, cfg: RLExperiment.Config, run: RunDirectory, say: Say):
        self._cfg, self._run, self._say = cfg, run, say
        self._log = EventLog(run.events_path)
        self._events = RowTail(run.events_path, from_end=True)
        self._metrics = RowTail(run.metrics_path)
        self._step = 0
        self._pids: dict[str, int] = {}  # of the roles that have started
        self._left: set[str] = set()  # those that went when they were asked to, and have not started again
        self._former: dict[str, str] = {}  # processes that are about to end
        self._deaths: dict[str, list[str]] = {}  # since the last update: why
        self._told: set[str] = set()  # waits, since the last update
        self._kill = PlannedKill(cfg, run)
        self._token = secrets.token_hex(16)
        self._namespace = f"{run.path.name}-{self._token[:8]}"
        self._peers = {name: self._start("parameter_server", name) for name in server_names(cfg)}
        self._peers |= {kind: self._start(kind, kind) for kind in ("controller", "verifier")}
        self._loopers = {"trainer": self._start("trainer", "trainer")}
        for name in (f"worker-{i}" for i in range(cfg.workers)):
            self._loopers[name] = self._start("worker", name)
        self._pulse = Pulse({**self._peers, **self._loopers}, cfg.patience, self._log, say)
        self._waiting: dict[Any, tuple[str, Literal["loop", "restart"]]] = {}

    @property
    def step(self) -> int:
        """Updates completed, as far as is known here."""
        return self._step

    def run(
        self,
        stop: Callable[[], bool],
        on_step: Callable[[int], None],
        hurried: Callable[[], bool],
        check: Callable[[], None] = lambda: None,
    ) -> int:
        """Watch until the trainer's loop returns. `check()` raises if Ray itself has died: all else follows from it."""
        for name in self._loopers:
            self._begin(name)
        invite(self._run, self._namespace)
        asked: float | None = None
        while True:
            if asked is None and stop():
                asked = time.monotonic()
                self._loopers["trainer"].stop.remote()
            done, _ = ray.wait(list(self._waiting), timeout=0.25)
            check()
            self._look()
            self._feel()
            on_step(self._step)
            for reference in done:
                name, what = self._waiting.pop(reference)
                value = self._outcome(name, what, reference)
                if name == "trainer" and value is not None and (asked or value["step"] >= self._cfg.num_steps):
                    return value["step"]
                if name == "trainer" and asked:
                    return self._step  # it died before it could save: what was saved last is resumed
            if asked and hurried() and time.monotonic() > asked + self._cfg.patience.grace:
                self._say(f"the trainer was not done within patience.grace={self._cfg.patience.grace:g} s of SIGTERM")
                return self._step

    def close(self) -> None:
        """Stop the workers, then end all actors; nothing is left running."""
        uninvite(self._run)
        brief = self._cfg.patience.clone(restart=2.0)
        try:
            controller = RemoteRole("controller", self._peers["controller"], brief, limit=5.0)
            controller.stop()
            give_up = time.monotonic() + _GUESTS_LEAVE
            while set(controller.status()["workers"]) - set(self._loopers) and time.monotonic() < give_up:
                time.sleep(0.1)
            RemoteRole("verifier", self._peers["verifier"], brief, limit=5.0).close()
        except (UserError, RayActorError):
            pass  # already gone
        for actor in [*self._loopers.values(), *self._peers.values()]:
            ray.kill(actor)
        self._look()
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
            scheduling_strategy=self._home(name) if kind == "worker" else "DEFAULT",
            runtime_env={"env_vars": _environment(kind)},
        )
        return actor.remote(kind, name, str(self._run.path), self._token, self._cfg.patience.grace, self._namespace)

    def _home(self, worker: str) -> Any:
        """Workers go to the nodes in turn, and to another when theirs is lost. (Ray's SPREAD is by chance.)"""
        nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
        index = int(worker.removeprefix("worker-")) % len(nodes)
        return NodeAffinitySchedulingStrategy(nodes[index], soft=True)

    def _begin(self, name: str) -> None:
        self._left.discard(name)
        actor = self._loopers[name]
        loop = actor.run_trainer if name == "trainer" else actor.run_worker
        self._waiting[loop.remote(self._peers)] = (name, "loop")

    def _outcome(self, name: str, what: str, reference: Any) -> dict[str, Any] | None:
        """What a loop returned. If its process died or left, None: its restart is waited for and the loop begun again.

        Raises:
            UserError: what the loop raised, if a user can mend it. Others: the second time in a row.
        """
        try:
            value = result(reference)
        except RayActorError as error:
            if what == "loop":
                self._note_loss(name, error)
            self._await_restart(name)
            return None
        except UserError:
            raise
        except Exception as error:
            self._note_failure(name, error)
            self._await_restart(name)
            return None
        if what == "restart":
            if value == self._former.get(name):
                self._await_restart(name)
            else:
                self._begin(name)
            return None
        if value["left"]:
            self._former[name] = value["life"]
            self._note_leave(name)
            self._await_restart(name)
        return value

    def _await_restart(self, name: str) -> None:
        time.sleep(0.1)
        self._waiting[self._loopers[name].life.remote()] = (name, "restart")

    def _note_loss(self, name: str, error: RayActorError) -> None:
        self._look()
        if name in self._left:
            return self._note_leave(name)
        self._log.append("driver", "died", target=name)
        self._note_death(name, "died", error)
        if name != self._kill.target:
            self._say(f"{name} (pid {self._pids.get(name, 'unknown')}) died at update {self._step}; starting it again")

    def _note_failure(self, name: str, error: Exception) -> None:
        """Its loop raised what no user can mend. Once that may be the machine's fault."""
        why = repr(getattr(error, "cause", error))  # without Ray's wrapping
        self._log.append("driver", "died", target=name, error=why)
        if why in self._deaths.get(name, []):
            raise error
        self._note_death(name, why, error)
        self._say(f"{name} failed at update {self._step}; starting it again. {why}")
        if name in self._pulse.lives:
            self._former[name] = self._pulse.lives[name]
        ray.kill(self._loopers[name], no_restart=False)

    def _note_death(self, name: str, why: str, error: Exception) -> None:
        deaths = self._deaths.setdefault(name, [])
        deaths.append(why)
        if len(deaths) >= DEATHS:
            raise UserError(
                f"{name} died {DEATHS} times without an update in between, at update {self._step}; "
                f"its output is in the logs of Ray's session. {error}"
            )
        if name != "trainer":  # nobody waits for the answer: if it is lost, the worker says so itself when it joins
            self._peers["controller"].call.remote("release", (name, "worker died"), {})

    def _note_leave(self, name: str) -> None:
        self._say(f"{name} (pid {self._pids.get(name, 'unknown')}) left when asked to by SIGTERM; starting it again")

    def _look(self) -> None:
        """Take note of what the roles have written down."""
        for row in self._metrics.new_rows():
            if row["phase"] == "rl":
                self._deaths, self._step = {}, row["step"]
                self._told.clear()
        for row in self._events.new_rows():
            self._see(row)
        if self._kill.due(self._step) and self._kill.name in self._pids:
            self._kill.do(self._pids[self._kill.name], self._loopers[self._kill.name], self._step, self._log)

    def _feel(self) -> None:
        """Take note of which processes live."""
        for name in self._pulse.look():
            if name not in self._loopers and name not in self._left:  # of loops their end tells
                self._log.append("driver", "died", target=name)

    def _see(self, row: dict[str, Any]) -> None:
        match row["event"]:
            case "start" if "pid" in row:
                self._pids[row["role"]] = row["pid"]
                self._left.discard(row["role"])
            case "leave":
                self._left.add(row["role"])
            case "waiting" if row["role"] != "driver" and row["what"] not in self._told:
                self._told.add(row["what"])
                self._say(f"waiting {row['seconds']:.0f} s for {row['what']} ({row['who']})")
            case "productive" if row["role"] not in self._loopers:
                self._say(f"{row['role']} joined: its first rollouts came after {row['join_s']:.1f} s")
        self._kill.see(row, self._say)


def _environment(kind: str) -> dict[str, str]:
    """A role without device work must not open the accelerator; JAX processes share the cores of a machine."""
    names = ("JAX_PLATFORMS", "XLA_FLAGS", "AXL_COMPILATION_CACHE")
    inherited = {name: os.environ[name] for name in names if name in os.environ}
    if kind not in ("trainer", "worker"):
        inherited["JAX_PLATFORMS"] = "cpu"
    return inherited
