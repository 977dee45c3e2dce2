"""Heartbeats of the workers: which of them have fallen silent, because they were killed, stopped or cut off."""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable

from axlearn_like.run.clock import REAL
from axlearn_like.run.events import EventLog


class Heartbeats:
    """Times of the last heartbeats, by worker. A worker that sends none is not watched.

    Silence is measured against the newest heartbeat of all workers, not against the clock: a controller that stood
    still itself has heard nobody, and nobody is lost by that.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = REAL, events: EventLog | None = None):
        """Watch nobody yet; `limit`: seconds of silence that lose a worker; `events`: log of events `silent`."""
        self._limit, self._clock, self._events = limit, clock, events
        self._heard: OrderedDict[str, float] = OrderedDict()  # longest silent first
        self._lock = threading.Lock()
        self._reported: set[str] = set()

    def heard(self, worker: str) -> None:
        """Record a heartbeat; for any thread."""
        with self._lock:
            self._heard[worker] = self._clock()
            self._heard.move_to_end(worker)

    def report(self) -> None:
        """Log who has fallen silent since the last call."""
        silent = set(self._silent())
        for worker in sorted(silent - self._reported):
            if self._events is not None:
                self._events.append("controller", "silent", worker=worker)
        self._reported = silent

    def lost(self, asker: str) -> list[str]:
        """Return the workers that are silent; not `asker`, which lives."""
        return [worker for worker in self._silent() if worker != asker]

    def forget(self, worker: str) -> None:
        """Watch a worker no longer."""
        with self._lock:
            self._heard.pop(worker, None)

    @property
    def watches(self) -> bool:
        """True if the heartbeats of some worker have come."""
        return bool(self._heard)

    def _silent(self) -> list[str]:
        if not self._heard:
            return []
        with self._lock:
            oldest = next(reversed(self._heard.values()), 0.0) - self._limit
            silent = itertools.takewhile(lambda heard: heard[1] < oldest, self._heard.items())
            return [worker for worker, _ in silent]
