"""The supervisor by a virtual clock: spares that are prepared again, and loops that begin once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rl.runtime.simulated.actors import PendingCall, SimulatedActor, SimulatedActors
from rl.runtime.simulated.recorded import RecordedEvents, RecordedLogs
from rl.runtime.simulated.virtual_clock import VirtualClock
from rl.runtime.supervision.role_group import Roles
from rl.runtime.supervision.supervisor import Supervisor
from tests.rl.tiny import tiny_experiment

UPDATES = 12


class Recorded(SimulatedActors):
    """Actors whose calls are recorded; the supervisor looks at the logs twice a second."""

    poll = 0.5

    def __init__(self, clock: VirtualClock, processes: Any):
        super().__init__(clock, processes)
        self.prepared, self.begun = list[str](), list[str]()

    def invoke(self, actor: SimulatedActor, method: str, *args: Any) -> PendingCall:
        if method in (called := {"prepare": self.prepared, "run": self.begun}):
            called[method].append(actor.name)
        return super().invoke(actor, method, *args)


class Run:
    """Processes that do nothing but a trainer's, which makes an update a second, some on batches of a new shape."""

    def __init__(self, folder: Path, new_shapes: set[int]):
        self.clock, self.step, self._new_shapes = VirtualClock(), 0, new_shapes
        self.events = RecordedEvents(folder / "events.jsonl", self.clock)
        self.actors = Recorded(self.clock, self)

    def seconds(self, kind: str) -> float:
        return 0.25

    def begun(self, name: str) -> None: ...

    def ended(self, name: str) -> None:
        self.clock.kill(name)

    def call_service(self, name: str, method: str, arguments: tuple[Any, ...]) -> None: ...

    def run_role(self, name: str, returned: Callable[[dict[str, Any]], None]) -> None:
        if name in ("trainer", "trainer-spare-0"):
            self.clock.spawn(name, lambda: self._train(returned))

    def _train(self, returned: Callable[[dict[str, Any]], None]) -> None:
        self.events.append("trainer", "start")
        while self.step < UPDATES:
            self.clock.sleep(1.0)
            self.step += 1
            if self.step in self._new_shapes:
                self.events.append("trainer", "compile")
        returned({"shutdown": False, "finished": True, "step": self.step})

    def supervised(self, kill_at: float | None, *, workers: int = 1, lost: Sequence[str] = ()) -> None:
        """Supervise the run; `lost`: processes whose raylet has died before, and whose spares are ready."""
        cfg = tiny_experiment(workers=workers, standby={"trainer": 1, **({"worker": 1} if lost else {})})
        logs = RecordedLogs(self.events, lambda: self.step)
        roles = Roles(cfg, self.actors)
        roles.ready |= roles.spares.keys() if lost else set()

        def drive() -> None:
            supervisor = Supervisor(cfg, roles, self.actors, logs, self.events, lambda text: None)
            supervisor.adopt({}, lost)
            supervisor.run(lambda: False, lambda step: None, lambda: False)
            self.clock.stop()

        if kill_at is not None:
            self.clock.timer(kill_at, lambda: self.actors.kill("trainer"))
        self.clock.spawn("driver", drive)
        self.clock.run()


@pytest.mark.parametrize(
    ("new_shapes", "prepared"),
    [({1}, 1), ({1, 6}, 2), ({1, 6, 9}, 3)],  # the first program is known before there is a spare
)
def test_a_spare_is_prepared_again_for_each_new_shape(new_shapes: set[int], prepared: int, tmp_path: Path) -> None:
    run = Run(tmp_path, new_shapes)
    run.supervised(kill_at=None)
    assert run.step == UPDATES
    assert run.actors.prepared == ["trainer-spare-0"] * prepared
    assert [row["target"] for row in run.events.rows if row["event"] == "ready"] == ["trainer-spare-0"]


def test_what_was_killed_is_the_next_spare(tmp_path: Path) -> None:
    run = Run(tmp_path, {1, 9})
    run.supervised(kill_at=4.1)
    assert run.step == UPDATES
    assert [row["event"] for row in run.events.rows if row["event"] in ("takeover", "ready")] == [
        "ready",
        "takeover",
        "ready",
    ]
    assert run.actors.prepared == ["trainer-spare-0", "trainer", "trainer"]


def test_a_driver_that_finds_processes_lost_begins_each_loop_once(tmp_path: Path) -> None:
    """The log of the trainer's start is read while the others begin: it lets them begin, too."""
    run = Run(tmp_path, {1})
    run.supervised(kill_at=None, workers=3, lost=["trainer", "worker-0"])
    assert run.step == UPDATES
    assert sorted(run.actors.begun) == ["trainer-spare-0", "worker-1", "worker-2", "worker-spare-0"]
