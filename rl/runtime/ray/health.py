"""The pulse of the roles' processes: one that does not answer is told of, and in the end killed and started again."""

import time
from typing import Any

import ray
from ray.exceptions import RayActorError

from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.roles.timeouts import Timeouts, Waits
from rl.runtime.ray.fault_injection import Say

_EVERY = 2.0  # seconds between questions


class HealthMonitor:
    """Asks each actor who it is, again and again; never waits itself."""

    def __init__(self, actors: dict[str, Any], timeouts: Timeouts.Config, log: EventLog, say: Say):
        self._actors, self._timeouts, self._log, self._say = actors, timeouts, log, say
        self.incarnations: dict[str, str] = {}  # of the processes that have answered last
        self._asked: dict[str, Any] = {}
        self._answered: dict[str, float] = {}
        self._down = set(actors)  # not started yet, or not again
        self._waits = Waits(timeouts.warn_after)

    def look(self) -> list[str]:
        """Take the answers that have come, ask anew; returns the roles whose processes have died since.

        Raises:
            UserError: one without which nothing goes on has not started within `timeouts.restart`.
        """
        now = time.monotonic()
        for name, actor in self._actors.items():
            if name not in self._asked and now >= self._answered.get(name, 0.0) + _EVERY:
                self._waits.begin(name)
                self._asked[name] = actor.incarnation.remote()
        waiting = list(self._asked.values())
        answers = ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else []
        died = [name for name, reference in list(self._asked.items()) if reference in answers and self._died(name)]
        waited_for = sorted(self._asked.keys() | self._down)
        self._report([name for name in waited_for if self._waits.due(name)])
        for name in waited_for:
            self._judge(name)
        return died

    def _died(self, name: str) -> bool:
        """Take the answer of one; whether it says that the process, which was alive, is dead."""
        try:
            self.incarnations[name] = ray.get(self._asked.pop(name))
        except RayActorError:
            alive = name not in self._down
            if alive:
                self._set_down(name)
            return alive
        self._answered[name] = time.monotonic()
        self._down.discard(name)
        self._waits.end(name)
        return False

    def _report(self, names: list[str]) -> None:
        """Of waits that have become long, all that began together in one line."""
        for what, group in (("start", self._down), ("answer", set(self._actors) - self._down)):
            if found := [name for name in names if name in group]:
                seconds = max(self._waits.begin(name) for name in found)
                what = f"{', '.join(found)} to {what}"
                self._log.append("driver", "waiting", who="driver", what=what, seconds=round(seconds, 1))
                self._say(f"waiting {seconds:.0f} s for {what}")

    def _judge(self, name: str) -> None:
        """One whose answer is still to come, or was that it is dead."""
        seconds, down = self._waits.begin(name), name in self._down
        limit = self._timeouts.restart if down else self._timeouts.unresponsive
        if seconds < limit:
            return
        if not down:
            self._log.append("driver", "unresponsive", target=name, seconds=round(seconds, 1))
            self._say(f"{name} has not answered for {seconds:.0f} s; killing it, to start it again")
            ray.kill(self._actors[name], no_restart=False)
            self._set_down(name)
        elif not name.startswith("worker-"):  # without one worker the run goes on
            raise UserError(
                f"{name} has not started for {seconds:.0f} s (timeouts.restart={limit:g}); "
                "is there room for it in the cluster? Its output is in the logs of Ray's session"
            )

    def _set_down(self, name: str) -> None:
        self._down.add(name)
        self._waits.end(name)
        self._waits.begin(name)
