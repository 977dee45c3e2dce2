"""The one place that imports reasoning-gym: lazily, as it takes a second, and without pycosat.

`reasoning_gym.logic.contrib.logic_puzzle` imports `pycosat`, a C extension published as source
only. On a machine without a compiler it cannot be installed, and then nothing of reasoning-gym
would import although one family of puzzles alone calls it. A placeholder takes its seat there: it
imports, and raises at the first use.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["import_reasoning_gym"]


class _MissingPycosat(ModuleType):
    """Stands in `sys.modules` for a pycosat that is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # Python's own protocols probe these with hasattr
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise ImportError(
            f"pycosat.{name} is needed by reasoning_gym.logic.contrib.logic_puzzle "
            "(the family 'zebra_puzzles') only, and pycosat is not installed: it is a C extension "
            "that ships as source; install a C compiler, then `pip install pycosat`",
            name="pycosat",
        )


def _provide_pycosat() -> None:
    """Import pycosat, or install a placeholder module where it cannot be imported."""
    try:
        importlib.import_module("pycosat")
    except ImportError:
        placeholder = _MissingPycosat("pycosat", "Placeholder: pycosat is not installed.")
        placeholder.__spec__ = ModuleSpec("pycosat", loader=None)
        sys.modules["pycosat"] = placeholder


def import_reasoning_gym() -> ModuleType:
    """The module `reasoning_gym`.

    Raises:
        ImportError: reasoning-gym itself is not installed.
    """
    _provide_pycosat()
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ImportError(
            "the tasks of rl/ come from reasoning-gym, which is not installed: "
            "`pip install reasoning-gym`, or `make install` where there is no C compiler",
            name="reasoning_gym",
        ) from error
