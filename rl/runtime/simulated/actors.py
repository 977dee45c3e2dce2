"""The processes of a simulated run, for its supervisor, which is the real one: what Ray does there takes durations."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Protocol

from rl.runtime.simulated.virtual_clock import Timer, VirtualClock
from rl.runtime.supervision.actors import ActorDied, Actors

_NOTICED = 0.25  # seconds until Ray has noticed the end of a process
_LOOK = 30.0  # seconds between two looks at what no call tells, and between two health checks


@dataclasses.dataclass(eq=False)
class PendingCall:
    """A call, and its result once there is one."""

    done: bool = False
    value: Any = None
    error: ActorDied | None = None


@dataclasses.dataclass(eq=False)
class SimulatedActor:
    """An actor; the names of its processes begin with its own."""

    kind: str
    name: str
    starts: int = 1  # processes so far
    alive: bool = True
    lost: bool = False  # nothing starts before its host is back
    starting: Timer | None = None
    calls: list[PendingCall] = dataclasses.field(default_factory=list[PendingCall])  # calls of its process, unanswered

    @property
    def incarnation(self) -> str:
        """Id of its process."""
        return f"{self.name} {self.starts}"


class Processes(Protocol):
    """Processes of roles; each call passes in no time."""

    def seconds(self, kind: str) -> float: ...
    def begun(self, name: str) -> None: ...
    def ended(self, name: str) -> None: ...
    def run_role(self, name: str, returned: Callable[[dict[str, Any]], None]) -> None: ...
    def call_service(self, name: str, method: str, arguments: tuple[Any, ...]) -> None: ...


class SimulatedActors(Actors):
    """Actors of a simulation; what ends starts again, unless its host is lost."""

    poll, interval, driver = _LOOK, _LOOK, 0

    def __init__(self, clock: VirtualClock, processes: Processes):
        self.clock, self._processes = clock, processes
        self._answered = clock.condition()
        self._actors: dict[str, SimulatedActor] = {}

    def start(self, kind: str, name: str) -> SimulatedActor:
        """Return the actor of a process, which lives from now on."""
        self._actors[name] = SimulatedActor(kind, name)
        return self._actors[name]

    def invoke(self, actor: SimulatedActor, method: str, *args: Any) -> PendingCall:
        reference = self.beside(actor, method)
        if actor.alive and method == "run":
            returned = lambda found: self._return(actor, reference, {"incarnation": actor.incarnation, **found})  # noqa: E731
            actor.calls.append(reference)
            reference.done = False
            self._processes.run_role(actor.name, returned)
        elif actor.alive and method == "call":
            self._processes.call_service(actor.name, args[0], args[1])
        return reference

    def beside(self, actor: SimulatedActor, method: str, *args: Any) -> PendingCall:
        """Start a call that is answered at once, or when the process is there."""
        reference = PendingCall()
        reference.done, reference.value = actor.alive, actor.incarnation
        if not actor.alive:
            actor.calls.append(reference)
        return reference

    def wait(self, references: Collection[PendingCall], timeout: float, *, every: bool = False) -> list[PendingCall]:
        enough = len(references) if every else 1
        with self._answered:
            self._answered.wait_for(lambda: sum(one.done for one in references) >= enough, timeout)
        return [one for one in references if one.done]

    def result(self, reference: PendingCall) -> Any:
        if reference.error is not None:
            raise reference.error
        return reference.value

    def restart(self, actor: SimulatedActor) -> None:
        self.kill(actor.name)

    def kill(self, name: str, *, host: bool = False) -> None:
        """Kill a process, which starts again; with its `host`: when that is back."""
        actor = self._actors[name]
        actor.lost = actor.lost or host
        if host and actor.starting is not None:
            actor.starting.cancel()
            actor.starting = None
        if not actor.alive:
            return
        actor.alive, calls, actor.calls = False, actor.calls, []
        self._processes.ended(name)
        self.clock.timer(_NOTICED, lambda: self._fail(actor, calls))

    def come_back(self, name: str) -> None:
        """Let a host be there again, on which a process then starts."""
        self._actors[name].lost = False
        self._start_again(self._actors[name])

    def _fail(self, actor: SimulatedActor, calls: list[PendingCall]) -> None:
        with self._answered:
            for reference in (*calls, *actor.calls):
                reference.done, reference.error = True, ActorDied(f"{actor.name} was killed")
            actor.calls = []
            self._answered.notify_all()
        if not actor.lost and actor.starting is None:
            self._start_again(actor)

    def _start_again(self, actor: SimulatedActor) -> None:
        def begun() -> None:
            with self._answered:
                actor.alive, actor.starts, actor.starting = True, actor.starts + 1, None
                self._processes.begun(actor.name)
                for reference in actor.calls:
                    reference.done, reference.value = True, actor.incarnation
                actor.calls = []
                self._answered.notify_all()

        actor.starting = self.clock.timer(self._processes.seconds(actor.kind), begun)

    def _return(self, actor: SimulatedActor, reference: PendingCall, value: dict[str, Any]) -> None:
        with self._answered:
            actor.calls.remove(reference)
            reference.done, reference.value = True, value
            self._answered.notify_all()
