"""The generic actor of a role. Nothing that reads the environment is imported before the actor has set its own.

Ray's way to give an actor variables (`runtime_env`) starts its process twice, one interpreter after the other, and
waits for an agent that each node starts for this alone: more than half a second of CPU for every start and restart.
"""

import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from mesh.imports import many_imports


class RoleActor:
    """The actor of one role, which forwards calls to its `RoleProcess`."""

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

    def invoke(self, name: str, *args: Any) -> Any:
        """Call a method of the role's process."""
        return getattr(self._process, name)(*args)


def _tell_jax(variables: Mapping[str, str]) -> None:
    """Set options that jax has read from other variables, in a fork that imported it; XLA and libtpu read later."""
    if "jax" not in sys.modules:
        return
    import jax

    for name in (name for name in variables if name.startswith("JAX_") and hasattr(jax.config, name.lower())):
        kind = type(getattr(jax.config, name.lower()))
        jax.config.update(name.lower(), kind(variables[name]) if kind in (int, float) else variables[name])
