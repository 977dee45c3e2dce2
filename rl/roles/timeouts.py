"""How long anyone waits for anyone, and what is said of it meanwhile: no wait is silent, and none is for ever."""

import time
from collections.abc import Callable, Hashable

from axlearn_like.config import ConfigBase, Configurable
from mesh import UserError


class Timeouts(Configurable):
    """Limits in seconds, the same for all roles of a run."""

    class Config(ConfigBase["Timeouts"]):
        grace: float = 25.0  # from SIGTERM to a role's end; schedulers kill after 30
        warn_after: float = 30.0  # a wait is told once it has lasted so long, and whenever that has doubled
        unresponsive: float = 90.0  # a role whose process does not answer for so long is killed and started again
        restart: float = 600.0  # a role that died is waited for; then the run ends with an error
        batch: float = 7200.0  # the trainer waits for a batch, a worker for its scores; then the same

    def __init__(self, cfg: Config):
        for name in ("grace", "warn_after", "unresponsive", "restart", "batch"):
            if not getattr(cfg, name) > 0:
                raise UserError(f"timeouts.{name}={getattr(cfg, name)}; expected seconds, more than 0")
        self.cfg = cfg


class Waits:
    """Waits under way by name, and when to speak of each: after `warn_after` seconds, and whenever that has doubled."""

    def __init__(self, warn_after: float, clock: Callable[[], float] = time.monotonic):
        self._warn_after, self._clock = warn_after, clock
        self._since: dict[Hashable, tuple[float, float]] = {}  # began, to be told next after so many seconds

    def begin(self, name: Hashable) -> float:
        """The wait goes on, or begins now; returns the seconds that it has lasted."""
        now = self._clock()
        return now - self._since.setdefault(name, (now, self._warn_after))[0]

    def end(self, name: Hashable) -> None:
        """It is over, if it was under way."""
        self._since.pop(name, None)

    def clear(self) -> None:
        """All are over."""
        self._since.clear()

    def due(self, name: Hashable) -> bool:
        """Whether it is time to speak of it; then not again for as long as it has lasted."""
        if name not in self._since:
            return False
        began, limit = self._since[name]
        seconds = self._clock() - began
        if seconds < limit:
            return False
        self._since[name] = (began, 2 * seconds)
        return True
