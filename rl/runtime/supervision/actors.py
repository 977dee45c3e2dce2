"""The processes of a run as their supervisor knows them: it asks for so much of Ray, or of a simulation.

`RayActors`, `RunLogs` and `FaultInjection` say what each method does.
"""

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

    def start(self, kind: str, name: str) -> Any: ...
    def invoke(self, actor: Any, method: str, *args: Any) -> Any: ...
    def beside(self, actor: Any, method: str, *args: Any) -> Any: ...
    def wait(self, references: Collection[Any], timeout: float, *, every: bool = False) -> list[Any]: ...
    def result(self, reference: Any) -> Any: ...
    def restart(self, actor: Any) -> None: ...


class Logs(Protocol):
    """Logs of the roles.

    Attributes:
        pids: newest process of each role.
        left: roles that shut down on SIGTERM and have not restarted.
    """

    pids: dict[str, int]
    left: set[str]

    @property
    def step(self) -> int: ...
    def updated(self) -> bool: ...
    def new_events(self) -> list[dict[str, Any]]: ...
    def process(self, name: str) -> str: ...


class Injected(Protocol):
    """Faults that are injected into the run."""

    target: str | None  # name of a worker that was killed on purpose, until it is replaced

    def inject(self, step: int, pids: Mapping[str, int], actors: Mapping[str, Any]) -> None: ...
    def read_event(self, row: dict[str, Any], say: Say) -> None: ...
