"""The supervisor of a run: starts the loops of all roles, again and again.

Ray, or a simulation, starts their processes, and restarts them. The supervisor starts the loops of trainer and workers
again when their process has restarted, and reports deaths and long waits.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.experiment import RLExperiment
from rl.runtime.supervision.actors import ActorDied, Actors, Injected, Logs, Say
from rl.runtime.supervision.health import Deaths, HealthMonitor
from rl.runtime.supervision.role_group import Awaited, Report, Roles

_PAUSE = 0.1  # seconds until a process that has ended is asked whether it is back


class Supervisor:
    """Supervises controller, parameter server, verifier, trainer, reference and workers."""

    def __init__(
        self,
        cfg: RLExperiment.Config,
        roles: Roles,
        calls: Actors,
        logs: Logs,
        log: EventLog,
        say: Say,
        fault: Injected | None = None,
    ):
        """Supervise roles whose actors have been started."""
        self._cfg, self._roles, self._calls, self._say = cfg, roles, calls, say
        self._log, self._logs, self._fault = log, logs, fault
        self._former: dict[str, str] = {}  # incarnations that are about to end
        self._deaths, self._term = Deaths(), 0  # number of the newest trainer
        self._at_work: dict[str, Any] = {}
        self._lost: set[str] = set()
        self._idle = [name for name in self._roles.loops if name not in self._roles.trainer.names]
        self._unprepared: dict[str, int] = {}  # spares that wait for an update, which needs the processor more
        actors = {**self._roles.services, **self._roles.loops}
        self._health = HealthMonitor(calls, actors, cfg.timeouts, self._log, say)
        self._waiting: dict[Any, tuple[str, Awaited]] = {}

    def adopt(self, found: Mapping[str, Report], lost: Collection[str]) -> None:
        """Follow the processes that a former driver has left at work, and those that it has `lost`, by their names."""
        self._term = max((one.term for one in found.values()), default=0)
        self._logs.pids |= {name: one.pid for name, one in found.items()}
        for name in sorted(self._roles.ready):
            self._log.append("driver", "ready", target=name)
        followed = {name: self._roles.loops[name] for name, one in found.items() if one.runs}
        call, driver = self._calls.invoke, self._calls.driver
        self._at_work = {name: call(actor, "outcome", driver) for name, actor in followed.items()}
        self._lost = set(lost)

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
        *,
        warm_start: bool = False,
    ) -> int:
        """Supervise until the trainer's loop returns; returns the updates. `check` raises if Ray itself has died."""
        for name in self._roles.trainer.names:
            self._begin(name)
        if not warm_start:
            self._begin_others()
        clock, asked = self._calls.clock, None
        while True:
            if asked is None and stop():
                asked = clock()
                self._calls.invoke(self._roles.loops["trainer"], "stop")
            done = self._calls.wait(self._waiting, self._calls.poll)
            check()
            self.read_logs()
            self._check_health()
            on_step(self.step)
            for reference in done:
                name, what = self._waiting.pop(reference)
                value = self._outcome(name, what, reference)
                if name == "trainer" and value is not None and (asked is not None or value["finished"]):
                    return value["step"]
                if name in self._roles.trainer.names and value is None and asked is not None:
                    return self.step  # died before its save: a resumed run starts from the last checkpoint
            if asked is not None and preempted() and clock() > asked + self._cfg.timeouts.grace:
                self._say(f"the trainer did not end within timeouts.grace={self._cfg.timeouts.grace:g} s of SIGTERM")
                return self.step

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
            self._note_loss(name, ActorDied("its raylet has died"))
            self._restart([name], [name])
        elif not group.several:
            self._run_loop(name)
        elif not incarnation:
            self._ask(name)
        elif group.started(name, incarnation):
            leader = group.leader
            self._waiting[self._calls.invoke(self._roles.loops[leader], "meeting_place")] = (leader, "meeting")

    def _run_loop(self, name: str, meeting: str = "") -> None:
        """Start the loop of a process; `meeting`: the address where several of its role join."""
        if name == self._roles.trainer.leader:
            self._term += 1
        term = self._term if name in self._roles.trainer.names else 0
        given = self._roles.called(), meeting, name, term, self._calls.driver
        self._waiting[self._calls.invoke(self._roles.loops[name], "run", *given)] = (name, "loop")

    def _take_over(self, name: str) -> str:
        """Let a spare, if one is prepared, run the loop of a process that has ended; returns the name of that now."""
        if (spare := self._roles.spare_for(name)) is None:
            return name
        if name in self._former:
            self._former[spare] = self._former.pop(name)
        self._waiting = {r: waiting for r, waiting in self._waiting.items() if waiting[0] != spare}
        self._roles.exchange(name, spare)
        self._health.exchange(name, spare)
        self._log.append("driver", "takeover", target=name, spare=spare)
        self._run_loop(name)
        return spare

    def _prepare_spares(self) -> None:
        for name in [name for name, step in self._unprepared.items() if self.step > step]:
            del self._unprepared[name]
            self._prepare(name)

    def _prepare(self, name: str) -> None:
        preparing = self._calls.invoke(self._roles.loops[name], "prepare", self._roles.called(), name)
        self._waiting[preparing] = (name, "preparation")

    def _begin_others(self) -> None:
        """Start the loops of workers and reference, once: what they need is there after the trainer's warm start."""
        idle, self._idle = self._idle, []  # reading the logs of one that is lost comes here again
        for name in idle:
            self._begin(name)

    def _outcome(self, name: str, what: Awaited, reference: Any) -> dict[str, Any] | None:
        """Return what a loop returned; None if its process ended, whose restart is then awaited.

        Raises:
            UserError: the loop raised it. Other exceptions: the loop raised the same one twice.
        """
        try:
            value = self._calls.result(reference)
        except Exception as error:
            self._note_end(name, what, error)
            return None
        if what == "loop":
            return self._note_return(name, value)
        if what == "preparation":
            if name not in self._roles.ready:
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
        if what == "preparation" and not isinstance(error, ActorDied):
            return self._say(f"{name} cannot be prepared, and the run goes on without it: {error}")
        if what not in ("loop", "preparation"):
            if not isinstance(error, ActorDied):
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
        """Await the restart of a role's processes, or a spare; `first` ended first, `dead` by themselves."""
        group = self._roles.groups[first[0]]
        self._waiting = {r: waiting for r, waiting in self._waiting.items() if waiting[0] not in group.names}
        self._former |= group.end(first, dead, self._log)
        ended = self._take_over(first[0])
        for name in group.names:
            self._await_restart(ended if name == first[0] else name)

    def _await_restart(self, name: str) -> None:
        # Asked again and again: what Ray tries again by itself, it does after pauses that grow to a second and more.
        self._calls.clock.sleep(_PAUSE)
        self._ask(name)

    def _ask(self, name: str) -> None:
        """Ask a process which one it is; the answer comes when it has started."""
        self._waiting[self._calls.beside(self._roles.loops[name], "ping")] = (name, "restart")

    def _note_loss(self, name: str, error: Exception) -> None:
        self.read_logs()
        if name in self._logs.left:
            return self._say(f"{self._logs.process(name)} shut down on SIGTERM; {self._roles.next(name)}")
        self._log.append("driver", "died", target=name)
        self._note_death(name, "died", error)
        if self._fault is None or name != self._fault.target:
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
        self._calls.restart(self._roles.loops[name])

    def _note_death(self, name: str, cause: str, error: Exception) -> None:
        self._deaths.add(name, cause, self.step, error)
        self._roles.release_dead(name)

    def read_logs(self) -> None:
        """Read the new rows of the metrics and of the event log."""
        if self._logs.updated():
            self._deaths = Deaths()
            self._prepare_spares()
        for row in self._logs.new_events():
            self._read_event(row)
        if self._fault is not None:
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
            case "compile" if row["role"] == self._roles.trainer.leader:  # a batch of another shape
                for name in [name for name in self._roles.ready if self._roles.spares[name] == "trainer"]:
                    self._prepare(name)
            case "waiting":
                self._say(f"waiting {row['seconds']:.0f} s for {row['what']} ({row['who']})")
            case "silent":
                self._roles.release("parameter-server", row["worker"])
                if row["worker"] not in self._roles.loops:
                    self._say(f"{row['worker']} is silent (killed, stopped or cut off?); its work goes to others")
            case "joined" if row["role"] not in self._roles.loops:
                self._say(f"{row['role']} joined: its first rollouts came after {row['join_s']:.1f} s")
        if self._fault is not None:
            self._fault.read_event(row, self._say)
