"""The processes of one trainer or worker: one program over one mesh; they start together and end together.

A process that dies leaves the others in a collective that will never complete. They are killed, all are restarted, and
when all are back they join again, at another port.
"""

from typing import Any, Literal

import ray
from ray.exceptions import RayActorError

from rl.runtime.ray.proxies import invoke_beside

_ANSWER_TIMEOUT = 3.0  # seconds for a live process to answer

Awaited = Literal["loop", "restart", "meeting"]


class RoleGroup:
    """The driver's view of the processes of a trainer or of one worker: one, or several."""

    def __init__(self, actors: dict[str, Any]):
        self._actors = actors
        self.names = list(actors)
        self.leader = self.names[0]  # the first process speaks for all
        self.several = len(actors) > 1  # more than one process
        self._ready: dict[str, str] = {}  # incarnations of the processes that have (re)started
        self._running = False  # all have joined, and their loops run

    def started(self, name: str, incarnation: str) -> bool:
        """Record that a process has started; returns True if all have, and can join."""
        self._ready[name] = incarnation
        return len(self._ready) == len(self.names)

    def begin(self) -> None:
        """Record that the loops of all processes run."""
        self._running = True

    def lost(self, name: str) -> bool:
        """Record that a process is gone; returns True if it must restart before the others can join."""
        return not self._running and self._ready.pop(name, None) is not None

    def reset(self) -> dict[str, str]:
        """Record that all processes have to restart; returns their incarnations until now."""
        former, self._ready, self._running = self._ready, {}, False
        return former

    def dead(self, name: str, error: Exception) -> list[str]:
        """Return the processes that are dead, after the loop of `name` has ended with this error."""
        asked = {other: invoke_beside(self._actors[other], "ping") for other in self.names if other != name}
        pending = list(asked.values())
        answers, _ = ray.wait(pending, num_returns=len(asked), timeout=_ANSWER_TIMEOUT) if asked else ([], [])
        gone = [other for other, reference in asked.items() if reference in answers and self._is_gone(other, reference)]
        return [*gone, name] if isinstance(error, RayActorError) else gone

    def first(self, dead: list[str]) -> list[str]:
        """Return those of the dead processes that died first.

        The leader runs the service of jax.distributed: its death ends all others at once, while the death of another
        ends no process. So if the leader is dead, it died first.
        """
        return [self.leader] if self.leader in dead else dead

    def _is_gone(self, name: str, reference: Any) -> bool:
        try:
            return ray.get(reference) != self._ready.get(name)
        except RayActorError:
            return True
