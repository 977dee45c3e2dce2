"""Timeouts between roles, and when a long wait is reported: no wait is silent, and none is endless."""

from collections.abc import Callable, Hashable
from typing import override

from axlearn_like.config import ConfigBase, Configurable, config_items
from axlearn_like.run.clock import REAL


class Timeouts(Configurable):
    """Limits in seconds, the same for all roles of a run."""

    class Config(ConfigBase["Timeouts"]):
        grace: float = 25.0  # seconds from SIGTERM to the end of a role; schedulers kill after 30
        warn_after: float = 30.0  # a wait is reported after this time, and each time it has doubled
        silent: float = 2.5  # a worker whose heartbeat fails for this time loses its lease to one that asks for work
        unresponsive: float = 90.0  # a role whose process does not answer for this time is killed and restarted
        restart: float = 600.0  # a role that died may take this long to restart; then the run ends with an error
        batch: float = 7200.0  # the trainer waits this long for a batch, a worker for scores; then likewise

        @override
        def check_fields(self) -> None:
            for field, seconds in config_items(self):
                self.require(field, seconds > 0, "seconds, more than 0")

    def __init__(self, cfg: Config):
        self.cfg = cfg


class Waits:
    """Current waits by name, and when each is due for a report: after `warn_after` seconds, then each time doubled."""

    def __init__(self, warn_after: float, clock: Callable[[], float] = REAL):
        self._warn_after, self._clock = warn_after, clock
        self._since: dict[Hashable, tuple[float, float]] = {}  # began, seconds until the next report

    def begin(self, name: Hashable) -> float:
        """Begin a wait, or continue it; returns the seconds since it began."""
        now = self._clock()
        return now - self._since.setdefault(name, (now, self._warn_after))[0]

    def end(self, name: Hashable) -> None:
        """End a wait, if there is one of this name."""
        self._since.pop(name, None)

    def clear(self) -> None:
        """End all waits."""
        self._since.clear()

    def due(self, name: Hashable) -> bool:
        """Return True if the wait is to be reported now; the next report is due when it has lasted twice as long."""
        if name not in self._since:
            return False
        began, limit = self._since[name]
        seconds = self._clock() - began
        if seconds < limit:
            return False
        self._since[name] = (began, 2 * seconds)
        return True
