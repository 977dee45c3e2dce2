"""The processes of the trainer: one program over one mesh, so they begin together and end together.

A process that dies leaves the others in the middle of a collective that will never be complete. They are killed, all
are started again, and when all are there they meet anew, on another port.
"""

from typing import Any, Literal

import ray
from ray.exceptions import RayActorError

_ANSWER = 3.0  # seconds for a process that lives to say so

What = Literal["loop", "restart", "meeting"]


class TrainerGroup:
    """What the driver knows of them. One process alone is a group, too."""

    def __init__(self, actors: dict[str, Any]):
        self._actors = actors
        self.names = list(actors)
        self._ready: dict[str, str] = {}  # those that have come (back): their incarnations
        self._begun = False  # their loops, together

    @property
    def leader(self) -> str:
        return self.names[0]

    @property
    def several(self) -> bool:
        return len(self.names) > 1

    def came(self, name: str, incarnation: str) -> bool:
        """A process has started; whether all have, and can meet."""
        self._ready[name] = incarnation
        return len(self._ready) == len(self.names)

    def begin(self) -> None:
        """All have met."""
        self._begun = True

    def lost(self, name: str) -> bool:
        """A process that had come is gone; whether the others still wait, and it has to come once more."""
        return not self._begun and self._ready.pop(name, None) is not None

    def scatter(self) -> dict[str, str]:
        """All have to start again; which processes these were."""
        former, self._ready, self._begun = self._ready, {}, False
        return former

    def dead(self, name: str, error: Exception) -> list[str]:
        """Whose processes are dead, now that the loop of `name` has ended with this error."""
        asked = {other: self._actors[other].incarnation.remote() for other in self.names if other != name}
        answers, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER) if asked else ([], [])
        gone = [other for other, reference in asked.items() if reference in answers and self._is_gone(other, reference)]
        return [*gone, name] if isinstance(error, RayActorError) else gone

    def first(self, dead: list[str]) -> list[str]:
        """Whose death was that of the others, too.

        With the leader dies the service of jax.distributed, and that ends all others at once; the death of another ends
        nobody. So if the leader is dead, it was first.
        """
        return [self.leader] if self.leader in dead else dead

    def _is_gone(self, name: str, reference: Any) -> bool:
        try:
            return ray.get(reference) != self._ready.get(name)
        except RayActorError:
            return True
