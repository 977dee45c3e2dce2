"""Health checks of the roles' processes. One that does not answer is reported, then killed and restarted."""

from typing import Any

from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.protocol.timeouts import Timeouts, Waits
from rl.runtime.supervision.actors import ActorDied, Actors, Say

MAX_DEATHS = 5  # limit of one role's deaths without an update; more are a fault of the run


class HealthMonitor:
    """Health checks by asking each actor for its incarnation every few seconds, without blocking."""

    def __init__(
        self, calls: Actors, actors: dict[str, Any], timeouts: Timeouts.Config, log: EventLog, say: Say = print
    ):
        """`actors`: by their names."""
        self._calls, self._actors, self._timeouts, self._log, self._say = calls, actors, timeouts, log, say
        self.incarnations: dict[str, str] = {}  # actor -> incarnation in its last answer
        self._asked: dict[str, Any] = {}
        self._answered: dict[str, float] = {}
        self._down = set(actors)  # actors not started yet, or died and not restarted
        self._waits = Waits(timeouts.warn_after, calls.clock)

    def exchange(self, one: str, other: str) -> None:
        """Exchange the names of two actors."""
        tables: list[dict[str, Any]] = [self._actors, self.incarnations, self._asked, self._answered]
        for known in tables:
            a, b = known.pop(one, None), known.pop(other, None)
            known |= {name: value for name, value in ((one, b), (other, a)) if value is not None}
        down = {one: other, other: one}
        self._down = {down.get(name, name) for name in self._down}
        for name in down:
            self._waits.end(name)
            self._waits.begin(name)

    def check(self) -> list[str]:
        """Collect answers and ask again; returns the roles that have died (UserError: a needed one cannot start)."""
        since = self._calls.clock() - self._calls.interval
        for name, actor in self._actors.items():
            if name not in self._asked and self._answered.get(name, since) <= since:
                self._waits.begin(name)
                self._asked[name] = self._calls.beside(actor, "ping")
        answers = self._calls.wait(list(self._asked.values()), 0.0, every=True)
        died = [name for name, reference in list(self._asked.items()) if reference in answers and self._died(name)]
        waiting = sorted(self._asked.keys() | self._down)
        self._report([name for name in waiting if self._waits.due(name)])
        for name in waiting:
            self._enforce(name)
        return died

    def _died(self, name: str) -> bool:
        """Read the answer of an actor; returns True if its process was alive and is dead."""
        try:
            self.incarnations[name] = self._calls.result(self._asked.pop(name))
        except ActorDied as error:
            if error.never_began:  # import of its code fails: Ray does not start it again
                raise UserError(f"{name} cannot start: {str(error).strip().splitlines()[-1]}") from error
            was_alive = name not in self._down
            if was_alive:
                self._set_down(name)
            return was_alive
        self._answered[name] = self._calls.clock()
        self._down.discard(name)
        self._waits.end(name)
        return False

    def _report(self, names: list[str]) -> None:
        """Report long waits: one line for all roles that have to start, one for all that have to answer."""
        for what, group in (("start", self._down), ("answer", set(self._actors) - self._down)):
            if found := [name for name in names if name in group]:
                seconds = max(self._waits.begin(name) for name in found)
                what = f"{', '.join(found)} to {what}"
                self._log.append("driver", "waiting", who="driver", what=what, seconds=round(seconds, 1))
                self._say(f"waiting {seconds:.0f} s for {what}")

    def _enforce(self, name: str) -> None:
        """Apply the timeouts to a role that has not answered yet, or is down."""
        seconds, down = self._waits.begin(name), name in self._down
        limit = self._timeouts.restart if down else self._timeouts.unresponsive
        if seconds < limit:
            return
        if not down:
            self._log.append("driver", "unresponsive", target=name, seconds=round(seconds, 1))
            self._say(f"{name} has not answered for {seconds:.0f} s; killing and restarting it")
            self._calls.restart(self._actors[name])
            self._set_down(name)
        elif not name.startswith("worker-") and "-spare-" not in name:  # the run continues without these
            raise UserError(
                f"{name} has not started for {seconds:.0f} s (timeouts.restart={limit:g}); "
                "does the cluster have room for it? Its output is in the logs of Ray's session"
            )

    def _set_down(self, name: str) -> None:
        self._down.add(name)
        self._waits.end(name)
        self._waits.begin(name)


class Deaths:
    """Causes of deaths since the last update, by role."""

    def __init__(self):
        self._causes: dict[str, list[str]] = {}

    def had(self, name: str, cause: str) -> bool:
        """Return True if a role has died of this before."""
        return cause in self._causes.get(name, [])

    def add(self, name: str, cause: str, step: int, error: Exception) -> None:
        """Record a death at an update (UserError: there are too many)."""
        self._causes.setdefault(name, []).append(cause)
        if len(self._causes[name]) >= MAX_DEATHS:
            raise UserError(
                f"{name} died {MAX_DEATHS} times without an update in between, at update {step}; "
                f"its output is in the logs of Ray's session. {error}"
            )
