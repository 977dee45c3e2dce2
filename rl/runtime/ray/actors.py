"""The generic actor of a role. Nothing that reads the environment is imported before the actor has set its own.

Ray's way to give an actor variables (`runtime_env`) starts its process twice, one interpreter after the other, and
waits for an agent that each node starts for this alone: more than half a second of CPU for every start and restart.
"""

import os
import pickle
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray

from mesh.imports import many_imports

if TYPE_CHECKING:
    from rl.parameter_server.transport.endpoint import Endpoint


class RoleHost:
    """The actor that hosts one role: what is called of `RoleProcess` from outside."""

    def __init__(self, variables: Mapping[str, str], arguments: bytes):
        """Set the variables of this process, then start the role.

        Args:
            variables: variables of the environment; jax reads some when it is imported.
            arguments: those of `RoleProcess` by name, pickled, because their types import jax.
        """
        os.environ |= variables
        _tell_jax(variables)
        with many_imports():
            from rl.runtime.role_process import RoleProcess

        self._process = RoleProcess(**pickle.loads(arguments))

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the role, for another role."""
        return self._process.call(method, args, kwargs)

    def endpoint(self) -> "Endpoint":
        """Return the address at which this parameter server process listens."""
        return self._process.endpoint()

    def run_worker(self, services: dict[str, Any], meeting: str = "") -> dict[str, Any]:
        """Run the worker's loop, or follow the process that does."""
        return self._process.run_worker(services, meeting)

    def run_trainer(self, services: dict[str, Any], meeting: str = "") -> dict[str, Any]:
        """Run the warm start, if it is due, and the trainer's loop."""
        return self._process.run_trainer(services, meeting)

    def run_reference(self, services: dict[str, Any], meeting: str = "") -> dict[str, Any]:
        """Run the reference role's loop."""
        return self._process.run_reference(services, meeting)

    def meeting_place(self) -> str:
        """Return an address on this host where the processes of one role can join."""
        return self._process.meeting_place()

    def stop(self) -> None:
        """Request that the loop ends after the current update."""
        self._process.stop()

    @ray.method(concurrency_group="health")
    def heard(self, worker: str) -> None:
        """Record a heartbeat of a worker at this controller."""
        self._process.heard(worker)

    @ray.method(concurrency_group="health")
    def incarnation(self) -> str:
        """Return an id of this process of the actor; answered whatever else the actor does."""
        return self._process.incarnation


def _tell_jax(variables: Mapping[str, str]) -> None:
    """Set the options that jax would have read from these variables, in a fork of an interpreter that has imported it.

    What XLA and libtpu read, they read when devices are opened.
    """
    if "jax" not in sys.modules:
        return
    import jax

    for name in (name for name in variables if name.startswith("JAX_") and hasattr(jax.config, name.lower())):
        kind = type(getattr(jax.config, name.lower()))
        jax.config.update(name.lower(), kind(variables[name]) if kind in (int, float) else variables[name])
