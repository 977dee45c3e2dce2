"""All tiers of a run's checkpoints as one: the newest on the local disk, the best, and copies elsewhere."""

from collections.abc import Mapping
from typing import Any

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.remote import RemoteTier
from axlearn_like.run.directory import EventLog


class CheckpointTiers:
    """A `Checkpointer`, and what is done with its checkpoints once they are on disk.

    A failure anywhere, in the background too, is raised by the next `check`.
    """

    def __init__(self, checkpointer: Checkpointer, best: KeepBest | None, remote: RemoteTier | None, events: EventLog):
        self._local, self._best, self._remote, self._events = checkpointer, best, remote, events
        self._unfinished: dict[int, float | None] = {}  # steps on their way to the disk -> value of the best metric
        self._saved: int | None = None  # the last step that `save` was called with

    def latest_step(self) -> int | None:
        """The newest complete checkpoint of any tier; a remote one is brought in first."""
        latest = self._local.latest_step()
        if self._remote is None:
            return latest
        fetched = self._remote.fetch_newer(latest)
        if fetched is None and latest is not None and self._remote.due(latest):
            self._remote.copy(latest)  # if it is there already nothing is done
        return latest if fetched is None else fetched

    def restore(self, abstract: Mapping[str, Any], step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """(state, extras) of `step`; see Checkpointer.restore."""
        return self._local.restore(abstract, step)

    def should_save(self, step: int) -> bool:
        return self._local.should_save(step)

    def save(
        self, step: int, state: Mapping[str, Any], extras: Mapping[str, Any], scalars: Mapping[str, Any] | None
    ) -> None:
        """Starts writing; `scalars` are those of the evaluation at this step, None if there was none.

        Raises:
            CheckpointError, DiskFull: a save or a copy failed. UserError: the best is sought by an unknown metric.
        """
        value = self._best.value(scalars) if self._best is not None and scalars is not None else None
        if step == self._saved:
            return
        self._local.save(step, state, extras)
        self._saved, self._unfinished[step] = step, value
        self.check()

    def check(self) -> None:
        """Raises what went wrong, and sees to what is finished. Free of cost while nothing is being written."""
        self._local.check()
        if self._remote is not None:
            self._remote.check()
        if self._unfinished:
            self._finish()

    def wait(self) -> None:
        """Blocks until all local checkpoints are on disk, and the best are kept."""
        self._local.wait()
        self._finish()

    def close(self) -> None:
        """Blocks until everything is written and copied."""
        try:
            self._local.close()
            self._finish()
        finally:
            if self._remote is not None:
                self._remote.close()

    def _finish(self) -> None:
        for step in [step for step in self._unfinished if (self._local.directory / str(step)).is_dir()]:
            value = self._unfinished.pop(step)
            self._events.append("trainer", "saved", step=step)
            if self._best is not None and value is not None and self._best.offer(step, value):
                self._events.append("trainer", "best", step=step, value=value)
            if self._remote is not None and self._remote.due(step):
                self._remote.copy(step)
