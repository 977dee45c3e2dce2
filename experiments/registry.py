"""Experiments by name.

    @experiment
    def rl_run(*, steps: int = 100) -> RLRun.Config:
        "One line that says what the experiment shows."

marks a function that returns a config. `get("rl_run")` finds it in any module of this package;
`get("path/to/file.py:rl_run")` and `get("package.module:rl_run")` find one that lives elsewhere,
which may have the name of one in here.
"""

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from axlearn_like.config import ConfigBase, label
from mesh.errors import did_you_mean

_functions: dict[str, Callable[..., ConfigBase[Any]]] = {}


def experiment[F: Callable[..., ConfigBase[Any]]](function: F) -> F:
    """Registers a top-level function under its name; it must be callable without arguments.

    Raises:
        TypeError: for a local function or one with a parameter that has no default.
        ValueError: when another module of the package has an experiment of that name.
    """
    name, qualname = function.__name__, function.__qualname__
    if name != qualname:
        raise TypeError(f"experiment {qualname}: only a top-level function can be found by name")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is parameter.empty:
            raise TypeError(f"experiment {name}: the parameter {parameter} must have a default")
    if not function.__module__.startswith(f"{__package__}."):
        return function
    other = _functions.get(name)
    if other is not None and other.__module__ != function.__module__:
        where = f"{other.__module__} and {function.__module__}"
        raise ValueError(f"two experiments are called {name!r}, in {where}; rename one")
    _functions[name] = function  # The same module again is a reload in a notebook.
    return function


def names() -> list[str]:
    """The names of the experiments of this package, sorted; imports its modules."""
    _import_all()
    return sorted(_functions)


def find(name: str) -> Callable[..., ConfigBase[Any]]:
    """The function behind a name, `path/to/file.py:function` or `package.module:function`.

    Raises:
        LookupError: when there is none, with the nearest names.
    """
    if ":" in name:
        place, _, function_name = name.rpartition(":")
        module = _module_at(place)
        function = getattr(module, function_name, None)
        if not inspect.isfunction(function):
            functions = [n for n, f in vars(module).items() if inspect.isfunction(f)]
            hint = did_you_mean(function_name, functions)
            raise LookupError(f"{place} has no function {function_name!r}{hint}")
        return function
    if name not in _functions:
        _import_all()
    if name not in _functions:
        raise LookupError(f"no experiment {name!r}{did_you_mean(name, names())}")
    return _functions[name]


def get(name: str, **arguments: Any) -> ConfigBase[Any]:
    """The config of an experiment; its errors call the root by the experiment's name.

    Raises:
        LookupError: when there is no such experiment, with the nearest names.
        TypeError: when the function returns something else than a config.
    """
    function = find(name)
    cfg = function(**arguments)
    if not isinstance(cfg, ConfigBase):
        raise TypeError(f"experiment {name!r} returned {cfg!r}, not a config")
    return label(cfg, function.__name__)


def _import_all() -> None:
    package = importlib.import_module(__package__ or "experiments")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def _module_at(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _module_of_file(Path(place).resolve())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise LookupError(f"no module {error.name!r} (in {place!r})") from error


def _module_of_file(path: Path) -> ModuleType:
    """Imports a file under its own name, so that what it defines can be written to text."""
    if not path.is_file():
        raise LookupError(f"no file {path}")
    loaded = sys.modules.get(path.stem)
    found = loaded.__spec__ if loaded else importlib.util.find_spec(path.stem)
    if found is not None and (found.origin is None or Path(found.origin).resolve() != path):
        raise LookupError(f"{path}: there is already a module {path.stem!r}; rename the file")
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise LookupError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]  # As `import` does: a half-made module is no module.
        raise
    return module
