"""Jitted functions that are called through executables compiled elsewhere, where there is one for the arguments.

Unlike a train step (axlearn_like/operations/recompilation.py) a function may have many programs, one for each shape of
its arguments, and one that was not compiled elsewhere, or that does not take them, is compiled as ever.
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import os
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import jax

from mesh.programs.executables import VARIABLE, find_executable


class StoredPrograms:
    """Call jitted functions on the devices of one mesh, which is in force.

    Attributes:
        loaded: how many programs were loaded so far.
    """

    def __init__(self, devices: Iterable[Any] | None = None):
        """`devices`: in the order of the mesh; None: those of the mesh in force at the first call."""
        self._devices = None if devices is None else list(devices)
        self._found: dict[Hashable, jax.stages.Compiled | None] = {}
        self.loaded = 0

    def call(self, function: Any, *args: Any, arrays: Mapping[str, Any] | None = None, **static: Hashable) -> Any:
        """Return `function(*args, **arrays, **static)`.

        Args:
            function: jitted; the same for all calls with arguments of these shapes.
            args: pytrees of arrays, whose shardings follow from their shapes.
            arrays: such arguments by their names.
            static: values of its static arguments.
        """
        arrays = arrays or {}
        if not os.environ.get(VARIABLE):
            return function(*args, **arrays, **static)
        if self._devices is None:
            self._devices = list(jax.sharding.get_mesh().devices.flat)
        leaves, structure = jax.tree.flatten((args, arrays))
        key = function, structure, tuple((x.shape, x.dtype) for x in leaves), tuple(sorted(static.items()))
        if key not in self._found:
            self._found[key] = find_executable(function.lower(*args, **arrays, **static), self._devices)
            self.loaded += self._found[key] is not None
        found = self._found[key]
        if found is None:
            return function(*args, **arrays, **static)
        try:
            return found(*args, **arrays)
        except (TypeError, ValueError) as error:  # arguments are compared before anything runs or is donated
            print(f"axl: a program that was compiled elsewhere does not take these arguments: {error}")
            self._found[key] = None
            self.loaded -= 1
            return function(*args, **arrays, **static)
