"""A run's checkpoints as one: states in memory of another process, the newest on disk, and the best of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.interval import SaveInterval
from axlearn_like.run.events import EventLog


class Held(NamedTuple):
    """Frozen parameters that are there already, as other runs in this process have them, too."""

    params: Any  # the parameters, nested
    beside: Sequence[Path] = ()  # directories of the checkpoints of those runs, whose files are linked


class MemoryTier(Protocol):
    """States in memory that outlives the process, after each step."""

    frozen: Collection[str]  # paths in the state of arrays that no update changes

    def latest_step(self) -> int | None:
        """Return the step of the newest state that this process has been sent; None: there is none."""
        ...

    def restore(self, abstract: Mapping[str, Any], step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (state, extras) of `step`; see Checkpointer.restore."""
        ...

    def hold(self, step: int, state: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        """Begin to send a state to the other process; the arrays may be donated as soon as this returns."""
        ...


class CheckpointTiers:
    """A `Checkpointer`, and what keeps the best of its checkpoints once they are on disk."""

    def __init__(self, checkpointer: Checkpointer, best: KeepBest | None, events: EventLog):
        self.memory: MemoryTier | None = None  # set before anything is restored; None: there is none
        self.writes: Callable[[], bool] = lambda: True  # rule: False where another process saves
        # Function (step, state) -> the state to save, where each process has a part of it; None: not here, or not now
        self.gathered: Callable[[int, Mapping[str, Any]], Mapping[str, Any] | None] = lambda step, state: state
        self._local, self._best, self._events = checkpointer, best, events
        self._unfinished: dict[int, float | None] = {}  # steps on their way to the disk -> value of the best metric
        self._saved: int | None = None  # the last step that `save` was called with
        self._valued_later: Callable[[int], bool] | None = None

    def freeze(self, frozen: Collection[str], held: Held | None = None) -> None:
        """Write the parameters at these paths, which no update changes, once; those that are `held` are not read."""
        self._local.frozen = frozen
        if self.memory is not None:
            self.memory.frozen = frozenset(f"params/{path}" for path in frozen)
        if held is not None:
            self._local.held, self._local.beside = held.params, held.beside

    def expect_values(self, steps: Callable[[int], bool]) -> None:
        """Hold the checkpoints of these steps, and of no others, for `offer`: their metric comes after the save."""
        self._valued_later = steps

    def pending(self) -> list[int]:
        """Return the steps whose metric is still to come."""
        return self._best.pending() if self._best is not None else []

    def offer(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Keep a checkpoint that was held if it is among the best. UserError: the metric is not among the scalars."""
        if self._best is not None and self._best.offer(step, value := self._best.value(scalars)):
            self._events.append("trainer", "best", step=step, value=value)

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, or of a newer state in memory."""
        latest, held = self._local.latest_step(), None if self.memory is None else self.memory.latest_step()
        return held if held is not None and held > (latest or 0) else latest

    def restore(self, abstract: Mapping[str, Any], step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (state, extras) of `step`; see Checkpointer.restore."""
        if self.memory is not None and step == self.memory.latest_step():
            return self.memory.restore(abstract, step)
        return self._local.restore(abstract, step)

    def hold(self, step: int, make: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
        """Send the state and extras that `make` returns to the memory tier, if there is one."""
        if self.memory is not None:
            self.memory.hold(step, *make())

    def should_save(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step`."""
        return self._local.should_save(step)

    def choose(self, interval: SaveInterval | None) -> None:
        """Save as often as an interval by the failures of the run says, unless one is set."""
        if self._local.choose(interval) and interval is not None:
            self._events.append("trainer", "save_interval", **interval._asdict())

    def compares(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step` whose metric must be known then."""
        return self._best is not None and self._valued_later is None and self.should_save(step)

    def save(
        self, step: int, state: Mapping[str, Any], extras: Mapping[str, Any], scalars: Mapping[str, Any] | None
    ) -> None:
        """Start writing; `scalars` are those of the evaluation at this step, None if there was none.

        Raises:
            CheckpointError, DiskFull: a save failed. UserError: the best is sought by an unknown metric.
        """
        if step == self._saved:
            return
        whole = self.gathered(step, state)
        if whole is None or not self.writes():
            return
        self._local.save(step, whole, extras)
        self._saved, self._unfinished[step] = step, None
        if self._best is not None and scalars is not None and self._valued_later is None:
            self._unfinished[step] = self._best.value(scalars)  # saved first: a wrong name costs no checkpoint
        self.check()

    def check(self) -> None:
        """Raise what went wrong, and pass on what is finished. Free of cost while nothing is being written."""
        self._local.check()
        if self._unfinished:
            self._finish()

    def wait(self) -> None:
        """Wait until all checkpoints are on disk, and the best are kept."""
        self._local.wait()
        self._finish()

    def close(self) -> None:
        """Wait until everything is written."""
        self._local.close()
        self._finish()

    def _finish(self) -> None:
        for step in [step for step in self._unfinished if (self._local.directory / str(step)).is_dir()]:
            value = self._unfinished.pop(step)
            self._events.append("trainer", "saved", step=step)
            if self._best is not None and value is not None and self._best.offer(step, value):
                self._events.append("trainer", "best", step=step, value=value)
            if self._best is not None and self._valued_later is not None and self._valued_later(step):
                self._best.hold(step)
