"""The supervisor of a run: starts the actors of all roles, and restarts their loops.

Ray places actors, restarts their processes and keeps their logs. The supervisor starts the loops of trainer and workers
again when their process has restarted, reports deaths and long waits, and ends all actors with the run.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail
from mesh import UserError
from rl.experiment import RLExperiment
from rl.runtime.cluster_file import advertise, withdraw
from rl.runtime.policies.runs import policy_runs
from rl.runtime.ray.fault_injection import FaultInjection, Say
from rl.runtime.ray.health import HealthMonitor
from rl.runtime.ray.placement import start_actor
from rl.runtime.ray.proxies import REFERENCE, RemoteRole, invoke_beside, process_groups, result, server_names
from rl.runtime.ray.reservation import Reservation
from rl.runtime.ray.role_group import Awaited, RoleGroup
from rl.training.warm_start import is_warm_start_due

MAX_DEATHS = 5  # limit of one role's deaths without an update; more are a fault of the run
_LEAVE_TIMEOUT = 5.0  # seconds for elastic workers to leave


class Supervisor:
    """Supervises controller, parameter server, verifier, trainer, reference and workers."""

    def __init__(
        self,
        cfg: RLExperiment.Config,
        run: RunDirectory,
        say: Say,
        reservation: Reservation,
        *,
        kill_after_update: int | None = None,
    ):
        """Start all actors.

        Args:
            cfg: the experiment's.
            run: the run directory.
            say: prints a line for the user.
            reservation: the devices of trainer, reference and workers.
            kill_after_update: kill one worker at this update (see `FaultInjection`).
        """
        self._cfg, self._run, self._say, self._reservation = cfg, run, say, reservation
        self._log = EventLog(run.events_path)
        parts = policy_runs(cfg.build(), run)
        logs = {run.events_path: None, **{part.run.events_path: None for part in parts}}
        self._events = [JsonlTail(path, from_end=True) for path in logs]
        self._metrics = {part.name: JsonlTail(part.run.metrics_path) for part in parts}
        self._steps = dict.fromkeys(self._metrics, 0)  # completed updates of each policy, by the metrics read so far
        self._pids: dict[str, int] = {}  # role -> pid
        self._left: set[str] = set()  # roles that shut down on SIGTERM and have not restarted
        self._former: dict[str, str] = {}  # incarnations that are about to end
        self._deaths: dict[str, list[str]] = {}  # causes, since the last update
        self._reported: set[str] = set()  # waits that were reported since the last update
        self._fault = FaultInjection(run, workers=cfg.workers, after_update=kill_after_update)
        self._token = secrets.token_hex(16)
        self._namespace = f"{run.path.name}-{self._token[:8]}"
        self._services = {name: self._start("parameter_server", name) for name in server_names(cfg)}
        self._services |= {kind: self._start(kind, kind) for kind in ("controller", "verifier")}
        self._loops: dict[str, Any] = {}
        self._groups: dict[str, RoleGroup] = {}  # process name -> group
        roles = process_groups(cfg)
        for kind in ("trainer", REFERENCE, "worker"):
            for names in roles[kind]:
                actors = {name: self._start(kind, name) for name in names}
                self._loops |= actors
                self._groups |= dict.fromkeys(names, RoleGroup(actors))
        self._trainer, self._reference = self._groups["trainer"], sum(roles[REFERENCE], [])
        self._called = {**self._services, **{name: self._loops[name] for name in self._reference[:1]}}
        self._idle = [name for name in self._loops if name not in self._trainer.names]
        self._health = HealthMonitor({**self._services, **self._loops}, cfg.timeouts, self._log, say)
        self._waiting: dict[Any, tuple[str, Awaited]] = {}

    @property
    def step(self) -> int:
        """Completed updates, of all policies together where there are several."""
        return sum(self._steps.values())

    def run(
        self,
        stop: Callable[[], bool],
        on_step: Callable[[int], None],
        preempted: Callable[[], bool],
        check: Callable[[], None] = lambda: None,
    ) -> int:
        """Supervise until the trainer's loop returns; returns the completed updates.

        `check()` raises if Ray itself has died, which is the cause of all other errors then.
        """
        for name in self._trainer.names:
            self._begin(name)
        if not is_warm_start_due(self._cfg.warm_start, self._run):
            self._begin_others()
        advertise(self._run, ray.get_runtime_context().gcs_address, self._namespace)
        asked: float | None = None
        while True:
            if asked is None and stop():
                asked = time.monotonic()
                self._loops["trainer"].invoke.remote("stop")
            done, _ = ray.wait(list(self._waiting), timeout=0.25)
            check()
            self._read_logs()
            self._check_health()
            on_step(self.step)
            for reference in done:
                name, what = self._waiting.pop(reference)
                value = self._outcome(name, what, reference)
                if name == "trainer" and value is not None and (asked or value["finished"]):
                    return value["step"]
                if name in self._trainer.names and value is None and asked:
                    return self.step  # died before its save: a resumed run starts from the last checkpoint
            if asked and preempted() and time.monotonic() > asked + self._cfg.timeouts.grace:
                self._say(f"the trainer did not end within timeouts.grace={self._cfg.timeouts.grace:g} s of SIGTERM")
                return self.step

    def close(self) -> None:
        """Stop the workers, then end all actors."""
        withdraw(self._run)
        brief = self._cfg.timeouts.clone(restart=2.0)
        try:
            controller = RemoteRole("controller", self._services["controller"], brief, limit=5.0)
            controller.stop()
            give_up = time.monotonic() + _LEAVE_TIMEOUT
            while set(controller.status()["workers"]) - set(self._loops) and time.monotonic() < give_up:
                time.sleep(0.1)
            RemoteRole("verifier", self._services["verifier"], brief, limit=5.0).close()
        except (UserError, RayActorError):
            pass  # already gone
        for actor in [*self._loops.values(), *self._services.values()]:
            ray.kill(actor)
        self._read_logs()
        self._fault.close(self._say)

    def _start(self, kind: str, name: str) -> Any:
        slot, known = self._reservation.slot(name), {"token": self._token, "namespace": self._namespace}
        return start_actor(self._cfg, self._run, kind, name, slot, **known)

    def _begin(self, name: str, incarnation: str = "") -> None:
        """Start the loop of a process; of one among several of its role, as soon as all of them have started."""
        self._left.discard(name)
        group = self._groups[name]
        if not group.several:
            self._run_loop(name)
        elif not incarnation:
            self._await_restart(name)
        elif group.started(name, incarnation):
            self._waiting[self._loops[group.leader].invoke.remote("meeting_place")] = (group.leader, "meeting")

    def _run_loop(self, name: str, meeting: str = "") -> None:
        """Start the loop of a process; `meeting`: the address where several of its role join."""
        self._waiting[self._loops[name].invoke.remote("run", self._called, meeting)] = (name, "loop")

    def _begin_others(self) -> None:
        """Start the loops of workers and reference, once: what they need is there after the trainer's warm start."""
        for name in self._idle:
            self._begin(name)
        self._idle = []

    def _outcome(self, name: str, what: Awaited, reference: Any) -> dict[str, Any] | None:
        """Return what a loop returned; None if its process ended, whose restart is then awaited.

        Raises:
            UserError: the loop raised it. Other exceptions: the loop raised the same one twice.
        """
        try:
            value = result(reference)
        except Exception as error:
            self._note_end(name, what, error)
            return None
        if what == "loop":
            return self._note_return(name, value)
        if what == "meeting":
            self._groups[name].begin()
            for member in self._groups[name].names:
                self._run_loop(member, value)
        elif value == self._former.get(name):
            self._await_restart(name)
        else:
            self._begin(name, value)
        return None

    def _note_return(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        """Record that a loop has returned; it is started again if it returned because of SIGTERM."""
        if value["shutdown"]:
            self._former[name] = value["incarnation"]
            self._note_shutdown(name)
            self._restart([name], [name])
        return value

    def _note_end(self, name: str, what: Awaited, error: Exception) -> None:
        """Restart a process that died, or whose loop raised an error.

        Raises:
            The error, if it is not the death of a process and would come again.
        """
        group = self._groups[name]
        if what != "loop":
            if not isinstance(error, RayActorError):
                raise error
            group.lost(name)
            return self._await_restart(name)
        if dead := group.dead(name, error):
            for one in (first := group.first(dead)):
                self._note_loss(one, error)
            return self._restart(first, dead)
        if isinstance(error, UserError):
            raise error
        self._note_failure(name, error)
        self._restart([name], [name])

    def _restart(self, first: list[str], dead: list[str]) -> None:
        """Await the restart of a process that has ended, and restart all others of its role.

        `first`: the processes that ended first; `dead`: all that have ended by themselves.
        """
        group = self._groups[first[0]]
        self._waiting = {r: waiting for r, waiting in self._waiting.items() if waiting[0] not in group.names}
        self._former |= group.reset()
        for name in group.names:
            if name not in first:
                self._log.append("driver", "ended", target=name, cause=first[0])
            if name not in dead:
                ray.kill(self._loops[name], no_restart=False)
        for name in group.names:
            self._await_restart(name)

    def _await_restart(self, name: str) -> None:
        time.sleep(0.1)
        # Asked again and again: what Ray tries again by itself, it does after pauses that grow to a second and more.
        self._waiting[invoke_beside(self._loops[name], "ping")] = (name, "restart")

    def _note_loss(self, name: str, error: Exception) -> None:
        self._read_logs()
        if name in self._left:
            return self._note_shutdown(name)
        self._log.append("driver", "died", target=name)
        self._note_death(name, "died", error)
        if name != self._fault.target:
            self._say(f"{self._process(name)} died at update {self.step}; restarting {self._restarted(name)}")

    def _note_failure(self, name: str, error: Exception) -> None:
        """Restart a process whose loop raised an error that is not a UserError: once, it may be the machine's fault."""
        cause = repr(getattr(error, "cause", error))  # error inside Ray's wrapper
        self._log.append("driver", "died", target=name, error=cause)
        if cause in self._deaths.get(name, []):
            raise error
        self._note_death(name, cause, error)
        self._say(f"{name} failed at update {self.step}; restarting {self._restarted(name)}. {cause}")
        if name in self._health.incarnations:
            self._former[name] = self._health.incarnations[name]
        ray.kill(self._loops[name], no_restart=False)

    def _note_death(self, name: str, cause: str, error: Exception) -> None:
        deaths = self._deaths.setdefault(name, [])
        deaths.append(cause)
        if len(deaths) >= MAX_DEATHS:
            raise UserError(
                f"{name} died {MAX_DEATHS} times without an update in between, at update {self.step}; "
                f"its output is in the logs of Ray's session. {error}"
            )
        if name not in (*self._trainer.names, *self._reference):
            # Should the call fail, the worker releases its lease when it joins again.
            self._release("controller", self._groups[name].leader, "worker died")
            self._release("parameter-server", name)

    def _release(self, service: str, worker: str, *reason: str) -> None:
        """Let a service release what a worker that is gone holds there."""
        self._services[service].invoke.remote("call", "release", (worker, *reason), {})

    def _note_shutdown(self, name: str) -> None:
        self._say(f"{self._process(name)} shut down on SIGTERM; restarting {self._restarted(name)}")

    def _process(self, name: str) -> str:
        return f"{name} (pid {self._pids.get(name, 'unknown')})"

    def _restarted(self, name: str) -> str:
        group = self._groups[name]
        return f"all {group.leader} processes" if group.several else "it"

    def _read_logs(self) -> None:
        """Read the new rows of the metrics and of the event log."""
        for policy, metrics in self._metrics.items():
            for row in metrics.new_rows():
                if row["phase"] == "rl":
                    self._deaths, self._steps[policy] = {}, row["step"]
                    self._reported.clear()
        for row in (row for log in self._events for row in log.new_rows()):
            self._read_event(row)
        worker = self._fault.name
        if self._fault.due(self.step) and worker in self._pids:
            self._fault.kill(self._pids[worker], self._loops[worker], self.step, self._log)

    def _check_health(self) -> None:
        """Record which processes have died."""
        for name in self._health.check():
            if name in self._groups:
                if self._groups[name].lost(name):  # lost before its loop began
                    self._await_restart(name)
            elif name not in self._left:  # the end of a loop is recorded elsewhere
                self._log.append("driver", "died", target=name)

    def _read_event(self, row: dict[str, Any]) -> None:
        match row["event"]:
            case "start" if "pid" in row:
                self._pids[row["role"]] = row["pid"]
                self._left.discard(row["role"])
                if row["role"] == self._trainer.leader:
                    self._begin_others()
            case "shutdown":
                self._left.add(row["role"])
            case "waiting" if row["role"] != "driver" and row["what"] not in self._reported:
                self._reported.add(row["what"])
                self._say(f"waiting {row['seconds']:.0f} s for {row['what']} ({row['who']})")
            case "silent":
                self._release("parameter-server", row["worker"])
                if row["worker"] not in self._loops:
                    self._say(f"{row['worker']} is silent (killed, stopped or cut off?); its work goes to others")
            case "joined" if row["role"] not in self._loops:
                self._say(f"{row['role']} joined: its first rollouts came after {row['join_s']:.1f} s")
        self._fault.read_event(row, self._say)
