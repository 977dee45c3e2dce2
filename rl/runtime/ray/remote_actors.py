"""Actors of Ray, for the supervisor."""

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import RayActorError

from axlearn_like.run.clock import REAL
from mesh import UserError
from rl.protocol.timeouts import Timeouts
from rl.runtime.ray.proxies import RemoteRole, invoke_beside, result
from rl.runtime.supervision.actors import ActorDied, Actors
from rl.runtime.supervision.role_group import Roles

_LEAVE_TIMEOUT = 5.0  # seconds for elastic workers to leave


class RayActors(Actors):
    """Actors of Ray, which starts their processes again."""

    clock, poll, interval = REAL, 0.25, 2.0

    def __init__(self, start: Callable[[str, str], Any], driver: int = 0):
        """`start`: starts, or finds, the actor of a process of a role."""
        self._start, self.driver = start, driver

    def start(self, kind: str, name: str) -> Any:
        """Return the actor of a process of a role."""
        return self._start(kind, name)

    def invoke(self, actor: Any, method: str, *args: Any) -> Any:
        """Start a call of a role's process."""
        return actor.invoke.remote(method, *args)

    def beside(self, actor: Any, method: str, *args: Any) -> Any:
        """Start a call that is answered whatever else the process does."""
        return invoke_beside(actor, method, *args)

    def wait(self, references: Collection[Any], timeout: float, *, every: bool = False) -> list[Any]:
        """Wait for a result, or for `every` one."""
        pending = list(references)
        return ray.wait(pending, num_returns=len(pending) if every else 1, timeout=timeout)[0] if pending else []

    def result(self, reference: Any) -> Any:
        """Return a result that is there, or raise what the call has raised."""
        try:
            return result(reference)
        except RayActorError as error:
            raise ActorDied(str(error), never_began=error.actor_init_failed) from error

    def restart(self, actor: Any) -> None:
        """End the process of an actor, which Ray starts again."""
        ray.kill(actor, no_restart=False)


def end_roles(roles: Roles, timeouts: Timeouts.Config) -> None:
    """Let the workers stop, also those that have joined, then end all actors."""
    brief = timeouts.clone(restart=2.0)
    with contextlib.suppress(UserError, RayActorError):  # already gone
        controller = RemoteRole("controller", roles.services["controller"], brief, limit=5.0)
        controller.stop()
        give_up = REAL() + _LEAVE_TIMEOUT
        while set(controller.status()["workers"]) - set(roles.loops) and REAL() < give_up:
            REAL.sleep(0.1)
        RemoteRole("verifier", roles.services["verifier"], brief, limit=5.0).close()
    for actor in [*roles.loops.values(), *roles.services.values()]:
        ray.kill(actor)
