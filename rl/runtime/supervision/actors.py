"""The processes of a run as their supervisor knows them: it asks for so much of Ray, or of a simulation."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from axlearn_like.run.clock import RunClock

Say = Callable[[str], None]


class ActorDied(Exception):
    """The process that was called has ended, or did before it answered.

    Attributes:
        never_began: it could not be made; it is not started again.
    """

    def __init__(self, message: str = "", *, never_began: bool = False):
        super().__init__(message)
        self.never_began = never_began


class Actors(Protocol):
    """Actors. A process of theirs that ends is started again; until then calls of it wait, or fail.

    Attributes:
        clock: clock of the supervisor.
        poll: seconds between two looks at what no call tells.
        interval: seconds between two health checks of a process.
        driver: number of the driver; the later one's counts.
    """

    clock: RunClock
    poll: float
    interval: float
    driver: int

    def start(self, kind: str, name: str) -> Any:
        """Return the actor of a process of a role."""
        ...

    def invoke(self, actor: Any, method: str, *args: Any) -> Any:
        """Start a call of a role's process; returns a reference to its result."""
        ...

    def beside(self, actor: Any, method: str, *args: Any) -> Any:
        """Start a call that is answered whatever else the process does."""
        ...

    def wait(self, references: Collection[Any], timeout: float, *, every: bool = False) -> list[Any]:
        """Wait for a result, or for `every` one, and return the references to those that are there."""
        ...

    def result(self, reference: Any) -> Any:
        """Return a result that is there (ActorDied; or what the call has raised)."""
        ...

    def restart(self, actor: Any) -> None:
        """End the process of an actor, which is started again."""
        ...


class Logs(Protocol):
    """Logs of the roles.

    Attributes:
        pids: newest process of each role.
        left: roles that shut down on SIGTERM and have not restarted.
    """

    pids: dict[str, int]
    left: set[str]

    @property
    def step(self) -> int:
        """Completed updates, of all policies together where there are several."""
        ...

    def updated(self) -> bool:
        """Read the new metrics; returns True if there was an update."""
        ...

    def new_events(self) -> list[dict[str, Any]]:
        """Read the new events."""
        ...

    def process(self, name: str) -> str:
        """Return the name of a role with its process id."""
        ...


class Injected(Protocol):
    """Faults that are injected into the run."""

    target: str | None  # name of a worker that was killed on purpose, until it is replaced

    def inject(self, step: int, pids: Mapping[str, int], actors: Mapping[str, Any]) -> None:
        """Kill what has to be killed now."""
        ...

    def read_event(self, row: dict[str, Any], say: Say) -> None:
        """Read an event of the run."""
        ...
