"""The processes of the roles. Those of one trainer or worker run one program over one mesh: they live and die together.

A process that dies leaves the others in a collective that will never complete. They are killed, all are restarted, and
when all are back they join again, at another port.
"""

import dataclasses
from typing import Any, Literal

from axlearn_like.run.events import EventLog
from rl.experiment import RLExperiment
from rl.runtime.supervision.actors import ActorDied, Actors
from rl.runtime.supervision.names import REFERENCE, process_groups, server_names, spare_names

_ANSWER_TIMEOUT = 3.0  # seconds for a live process to answer

Awaited = Literal["loop", "restart", "meeting", "preparation"]


@dataclasses.dataclass(frozen=True)
class Report:
    """Work of a process."""

    name: str  # name that it has now: a spare that took over has that of the process whose place it took
    pid: int
    incarnation: str  # id of this process of the actor
    term: int  # number of the trainer that it is, or that has called it
    runs: bool  # True if it runs its loop, or has done so
    prepared_as: str  # name that it had when it was prepared to take over; "": it is not prepared


class RoleGroup:
    """The driver's view of the processes of a trainer or of one worker: one, or several."""

    def __init__(self, calls: Actors, actors: dict[str, Any]):
        """`actors`: by the names of their processes, the leader's first."""
        self._calls, self._actors = calls, actors
        self.names = list(actors)
        self.leader = self.names[0]  # the first process speaks for all
        self.several = len(actors) > 1  # more than one process
        self._ready: dict[str, str] = {}  # incarnations of the processes that have (re)started
        self._running = False  # all have joined, and their loops run

    def started(self, name: str, incarnation: str) -> bool:
        """Record that a process has started; returns True if all have, and can join."""
        self._ready[name] = incarnation
        return len(self._ready) == len(self.names)

    def begin(self) -> None:
        """Record that the loops of all processes run."""
        self._running = True

    def lost(self, name: str) -> bool:
        """Record that a process is gone; returns True if it must restart before the others can join."""
        return not self._running and self._ready.pop(name, None) is not None

    def end(self, first: list[str], dead: list[str], log: EventLog) -> dict[str, str]:
        """Kill the processes that are not `dead`, as the `first` have ended; returns the incarnations until now."""
        for name in self.names:
            if name not in first:
                log.append("driver", "ended", target=name, cause=first[0])
            if name not in dead:
                self._calls.restart(self._actors[name])
        return self.reset()

    def reset(self) -> dict[str, str]:
        """Record that all processes have to restart; returns their incarnations until now."""
        former, self._ready, self._running = self._ready, {}, False
        return former

    def dead(self, name: str, error: Exception) -> list[str]:
        """Return the processes that are dead, after the loop of `name` has ended with this error."""
        asked = {other: self._calls.beside(self._actors[other], "ping") for other in self.names if other != name}
        answers = self._calls.wait(list(asked.values()), _ANSWER_TIMEOUT, every=True)
        gone = [other for other, reference in asked.items() if reference in answers and self._is_gone(other, reference)]
        return [*gone, name] if isinstance(error, ActorDied) else gone

    def first(self, dead: list[str]) -> list[str]:
        """Return those of the dead processes that died first.

        The leader runs the service of jax.distributed: its death ends all others at once, while the death of another
        ends no process. So if the leader is dead, it died first.
        """
        return [self.leader] if self.leader in dead else dead

    def _is_gone(self, name: str, reference: Any) -> bool:
        try:
            return self._calls.result(reference) != self._ready.get(name)
        except ActorDied:
            return True


class Roles:
    """The actors of a run by the names of their processes.

    Attributes:
        services: roles that others call, which have no loop.
        loops: processes with a loop, of trainer, reference and workers, and those that wait to run one.
        groups: process name -> the processes that start and end with it.
        spares: names of prepared processes, or of those that get prepared -> their role.
        ready: spares that are prepared.
    """

    def __init__(self, cfg: RLExperiment.Config, calls: Actors):
        """Start all actors."""
        start, self._calls = calls.start, calls
        self.services = {name: start("parameter_server", name) for name in server_names(cfg)}
        self.services |= {kind: start(kind, kind) for kind in ("controller", "verifier")}
        self.loops: dict[str, Any] = {}
        self.groups: dict[str, RoleGroup] = {}
        groups = process_groups(cfg)
        self.spares = {name: kind for kind, names in spare_names(cfg).items() for name in names}
        alone = [(kind, [name]) for name, kind in self.spares.items()]
        for kind, names in [*((kind, names) for kind, known in groups.items() for names in known), *alone]:
            actors = {name: start(kind, name) for name in names}
            self.loops |= actors
            self.groups |= dict.fromkeys(names, RoleGroup(calls, actors))
        self.reference = sum(groups[REFERENCE], [])
        self.ready: set[str] = set()
        self._prepared_as: dict[str, str] = {}  # name that a process had when it was prepared

    @property
    def trainer(self) -> RoleGroup:
        """The processes of the trainer."""
        return self.groups["trainer"]

    def called(self) -> dict[str, Any]:
        """Return the actors that a loop calls: services, the leader of the reference, and where states are held."""
        names = (*self.reference[:1], *(name for name, kind in self.spares.items() if kind == "trainer"))
        return {**self.services, **{name: self.loops[name] for name in names}}

    def spare_for(self, name: str) -> str | None:
        """Return a prepared process that can take the place of this one; None: there is none."""
        kind = "trainer" if name in self.trainer.names else "worker"
        fits = (spare for spare in sorted(self.ready) if self.spares[spare] == kind)
        return None if name in self.reference or name in self.spares else next(fits, None)

    def next(self, name: str) -> str:
        """Say what follows the end of a process."""
        group, spare = self.groups[name], self.spare_for(name)
        again = f"restarting all {group.leader} processes" if group.several else "restarting it"
        return again if spare is None else f"{spare} takes over"

    def release(self, service: str, worker: str, *reason: str) -> None:
        """Let a service release what a worker that is gone holds; one that joins again releases it too."""
        self._calls.invoke(self.services[service], "call", "release", (worker, *reason), {})

    def release_dead(self, name: str) -> None:
        """Let all services release what a process that has died holds, unless it is no worker's."""
        if name in (*self.trainer.names, *self.reference):
            return
        self.release("controller", self.groups[name].leader, "worker died")
        for reader in {name, self._prepared_as.pop(name, name)}:
            self.release("parameter-server", reader)

    def place(self, name: str, actor: Any) -> None:
        """Let an actor have this name."""
        self.loops[name], self.groups[name] = actor, RoleGroup(self._calls, {name: actor})

    def note_report(self, name: str, incarnation: str, prepared_as: str, *, runs: bool) -> None:
        """Record what a process does that a former driver has started."""
        if runs:
            self.groups[name].started(name, incarnation)
            self.groups[name].begin()
            self._prepared_as |= {name: prepared_as} if prepared_as else {}
        elif prepared_as:
            self.ready.add(name)

    def exchange(self, name: str, spare: str) -> None:
        """Let a spare have the name of a process that has ended, which is a spare from now on."""
        self.ready.discard(spare)
        self._prepared_as[name] = spare
        self.loops[name], self.loops[spare] = self.loops[spare], self.loops[name]
        self.groups |= {one: RoleGroup(self._calls, {one: self.loops[one]}) for one in (name, spare)}
