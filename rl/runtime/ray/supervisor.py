"""The supervisor of a run: starts the actors of all roles, and restarts their loops.

Ray places actors, restarts their processes and keeps their logs. The supervisor starts the loops of trainer and workers
again when their process has restarted, reports deaths and long waits, and ends all actors with the run.
"""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.experiment import RLExperiment
from rl.runtime.cluster_file import advertise, withdraw
from rl.runtime.ray.adoption import Starter, adopt
from rl.runtime.ray.devices.reservation import Reservation
from rl.runtime.ray.fault_injection import FaultInjection, Say
from rl.runtime.ray.health import Deaths, HealthMonitor
from rl.runtime.ray.proxies import invoke_beside, result
from rl.runtime.ray.role_group import Awaited, Roles
from rl.runtime.ray.run_logs import RunLogs
from rl.runtime.simulated.failures import Faults
from rl.training.warm_start import is_warm_start_due


class Supervisor:
    """Supervises controller, parameter server, verifier, trainer, reference and workers."""

    def __init__(
        self,
        cfg: RLExperiment.Config,
        run: RunDirectory,
        say: Say,
        reservation: Reservation,
        *,
        faults: Faults,
    ):
        """Start all actors, but those that a former driver has left at work.

        Args:
            reservation: the devices of trainer, reference and workers.
            faults: what to kill (see `FaultInjection`).
        """
        self._cfg, self._run, self._say = cfg, run, say
        self._log = EventLog(run.events_path)
        self._logs = RunLogs(cfg, run)
        self._former: dict[str, str] = {}  # incarnations that are about to end
        self._deaths = Deaths()
        self._fault = FaultInjection(run, workers=cfg.workers, faults=faults)
        self._starter = Starter(cfg, run, reservation)
        self._roles = Roles(cfg, self._starter)
        found = adopt(self._roles, self._starter)
        self._term = max((one.term for one in found.values()), default=0)  # number of the newest trainer
        self._logs.pids |= {name: one.pid for name, one in found.items()}
        for name in sorted(self._roles.ready):
            self._log.append("driver", "ready", target=name)
        self._lost = {name for name in self._starter.found if name not in found and name in self._roles.loops}
        followed = {name: self._roles.loops[name] for name, one in found.items() if one.runs}
        self._at_work = {name: one.invoke.remote("outcome", self._starter.driver) for name, one in followed.items()}
        self._idle = [name for name in self._roles.loops if name not in self._roles.trainer.names]
        self._unprepared: dict[str, int] = {}  # spares that wait for an update, which needs the processor more
        self._health = HealthMonitor({**self._roles.services, **self._roles.loops}, cfg.timeouts, self._log, say)
        self._waiting: dict[Any, tuple[str, Awaited]] = {}

    @property
    def step(self) -> int:
        """Completed updates, of all policies together where there are several."""
        return self._logs.step

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
        for name in self._roles.trainer.names:
            self._begin(name)
        if not is_warm_start_due(self._cfg.warm_start, self._run):
            self._begin_others()
        advertise(self._run, ray.get_runtime_context().gcs_address, self._starter.namespace)
        asked: float | None = None
        while True:
            if asked is None and stop():
                asked = time.monotonic()
                self._roles.loops["trainer"].invoke.remote("stop")
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
                if name in self._roles.trainer.names and value is None and asked:
                    return self.step  # died before its save: a resumed run starts from the last checkpoint
            if asked and preempted() and time.monotonic() > asked + self._cfg.timeouts.grace:
                self._say(f"the trainer did not end within timeouts.grace={self._cfg.timeouts.grace:g} s of SIGTERM")
                return self.step

    def close(self) -> None:
        """Stop the workers, then end all actors."""
        withdraw(self._run)
        self._roles.end(self._cfg.timeouts)
        self._read_logs()
        self._fault.close(self._say)

    def _begin(self, name: str, incarnation: str = "") -> None:
        """Start the loop of a process; of one among several of its role, as soon as all of them have started."""
        self._logs.left.discard(name)
        group = self._roles.groups[name]
        if name in self._at_work:
            self._waiting[self._at_work.pop(name)] = (name, "loop")
        elif name in self._roles.spares:
            self._unprepared |= {} if name in self._roles.ready else {name: self.step}
        elif not group.several and name in self._lost:
            self._lost.discard(name)
            self._note_loss(name, RayActorError())
            self._restart([name], [name])
        elif not group.several:
            self._run_loop(name)
        elif not incarnation:
            self._await_restart(name)
        elif group.started(name, incarnation):
            self._waiting[self._roles.loops[group.leader].invoke.remote("meeting_place")] = (group.leader, "meeting")

    def _run_loop(self, name: str, meeting: str = "") -> None:
        """Start the loop of a process; `meeting`: the address where several of its role join."""
        if name == self._roles.trainer.leader:
            self._term += 1
        term = self._term if name in self._roles.trainer.names else 0
        given = self._roles.called(), meeting, name, term, self._starter.driver
        self._waiting[self._roles.loops[name].invoke.remote("run", *given)] = (name, "loop")

    def _take_over(self, name: str) -> None:
        """Let a spare, if one is prepared, run the loop of a process that has ended, whose restart is awaited."""
        if (spare := self._roles.spare_for(name)) is None:
            return
        self._waiting = {r: (spare if who == name else who, what) for r, (who, what) in self._waiting.items()}
        if name in self._former:
            self._former[spare] = self._former.pop(name)
        self._roles.exchange(name, spare)
        self._health.exchange(name, spare)
        self._log.append("driver", "takeover", target=name, spare=spare)
        self._run_loop(name)

    def _prepare_spares(self) -> None:
        for name in [name for name, step in self._unprepared.items() if self.step > step]:
            del self._unprepared[name]
            preparing = self._roles.loops[name].invoke.remote("prepare", self._roles.called(), name)
            self._waiting[preparing] = (name, "preparation")

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
        if what == "preparation":
            self._roles.ready.add(name)
            self._log.append("driver", "ready", target=name)
            return None
        if what == "meeting":
            self._roles.groups[name].begin()
            for member in self._roles.groups[name].names:
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
            self._say(f"{self._logs.process(name)} shut down on SIGTERM; {self._roles.next(name)}")
            self._restart([name], [name])
        return value

    def _note_end(self, name: str, what: Awaited, error: Exception) -> None:
        """Restart a process that died, or whose loop raised an error, which is raised here if it would come again."""
        group = self._roles.groups[name]
        if what == "preparation" and not isinstance(error, RayActorError):
            return self._say(f"{name} cannot be prepared, and the run goes on without it: {error}")
        if what not in ("loop", "preparation"):
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
        """Await the restart of a process that has ended and of all others of its role, or let a spare take its place.

        `first`: the processes that ended first; `dead`: all that have ended by themselves.
        """
        group = self._roles.groups[first[0]]
        self._waiting = {r: waiting for r, waiting in self._waiting.items() if waiting[0] not in group.names}
        self._former |= group.end(first, dead, self._log)
        for name in group.names:
            self._await_restart(name)
        self._take_over(first[0])

    def _await_restart(self, name: str) -> None:
        time.sleep(0.1)
        # Asked again and again: what Ray tries again by itself, it does after pauses that grow to a second and more.
        self._waiting[invoke_beside(self._roles.loops[name], "ping")] = (name, "restart")

    def _note_loss(self, name: str, error: Exception) -> None:
        self._read_logs()
        if name in self._logs.left:
            return self._say(f"{self._logs.process(name)} shut down on SIGTERM; {self._roles.next(name)}")
        self._log.append("driver", "died", target=name)
        self._note_death(name, "died", error)
        if name != self._fault.target:
            self._say(f"{self._logs.process(name)} died at update {self.step}; {self._roles.next(name)}")

    def _note_failure(self, name: str, error: Exception) -> None:
        """Restart a process whose loop raised an error that is not a UserError: once, it may be the machine's fault."""
        cause = repr(getattr(error, "cause", error))  # error inside Ray's wrapper
        self._log.append("driver", "died", target=name, error=cause)
        if self._deaths.had(name, cause):
            raise error
        self._note_death(name, cause, error)
        self._say(f"{name} failed at update {self.step}; {self._roles.next(name)}. {cause}")
        if name in self._health.incarnations:
            self._former[name] = self._health.incarnations[name]
        ray.kill(self._roles.loops[name], no_restart=False)

    def _note_death(self, name: str, cause: str, error: Exception) -> None:
        self._deaths.add(name, cause, self.step, error)
        self._roles.release_dead(name)

    def _read_logs(self) -> None:
        """Read the new rows of the metrics and of the event log."""
        if self._logs.updated():
            self._deaths = Deaths()
            self._prepare_spares()
        for row in self._logs.new_events():
            self._read_event(row)
        self._fault.inject(self.step, self._logs.pids, {**self._roles.services, **self._roles.loops})

    def _check_health(self) -> None:
        """Record which processes have died."""
        for name in self._health.check():
            if name in self._roles.ready or name in self._unprepared:
                self._roles.ready.discard(name)
                self._log.append("driver", "died", target=name)
                self._await_restart(name)
            elif name in self._roles.groups:
                if self._roles.groups[name].lost(name):  # lost before its loop began
                    self._await_restart(name)
            elif name not in self._logs.left:  # the end of a loop is recorded elsewhere
                self._log.append("driver", "died", target=name)

    def _read_event(self, row: dict[str, Any]) -> None:
        match row["event"]:
            case "start" if row["role"] == self._roles.trainer.leader:
                self._begin_others()
            case "waiting":
                self._say(f"waiting {row['seconds']:.0f} s for {row['what']} ({row['who']})")
            case "silent":
                self._roles.release("parameter-server", row["worker"])
                if row["worker"] not in self._roles.loops:
                    self._say(f"{row['worker']} is silent (killed, stopped or cut off?); its work goes to others")
            case "joined" if row["role"] not in self._roles.loops:
                self._say(f"{row['role']} joined: its first rollouts came after {row['join_s']:.1f} s")
        self._fault.read_event(row, self._say)
