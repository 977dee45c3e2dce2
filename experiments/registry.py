"""Experiments by name.

    @experiment
    def sort_digits(*, steps: int = 100) -> RLExperiment.Config:
        "One line that says what the experiment shows."

marks a function that returns a config. `get("sort_digits")` finds it in any module of this package;
`get("path/to/file.py:sort_digits")` and `get("package.module:sort_digits")` find one that lives elsewhere,
which may have the name of one in here. An installed package declares its own in the entry points `axl.experiments`.

What there is, is read from the source text of this package: a list of names, or an unknown name refused, imports no
module of it (and no jax).
"""

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from axlearn_like.config import ConfigBase, ConfigError, label
from axlearn_like.config.declared import installed, place_of
from axlearn_like.config.trusted_code import import_place
from experiments.recipes.recipes import recipes
from mesh.errors import UserError, did_you_mean


class Entry(NamedTuple):
    """An experiment of this package, as its source tells it."""

    module: str
    summary: str  # the first line of its docstring


def experiment[F: Callable[..., ConfigBase[Any]]](function: F) -> F:
    """Mark a top-level function as an experiment; it must be callable without arguments.

    Raises:
        UserError: for a local function, or one with a parameter that has no default.
    """
    name, qualname = function.__name__, function.__qualname__
    if name != qualname:
        raise UserError(f"experiment {qualname}: only a top-level function can be found by name")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is parameter.empty:
            raise UserError(f"experiment {name}: the parameter {parameter} must have a default")
    return function


@functools.cache
def entries() -> Mapping[str, Entry]:
    """The experiments of this package by name, sorted; nothing is imported.

    Raises:
        UserError: two modules have an experiment of one name.
    """
    return read_entries(Path(__file__).parent, __package__ or "experiments")


def read_entries(folder: Path, package: str, mark: str = "experiment") -> Mapping[str, Entry]:
    """The functions that the modules below a folder decorate with a name: `experiment`, or `dataset`.

    Raises:
        UserError: two modules have one of the same name.
    """
    found: dict[str, Entry] = {}
    for path in sorted(folder.rglob("*.py")):
        module = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.FunctionDef) and any(_marks(decorator, mark) for decorator in node.decorator_list):
                entry = Entry(module, (ast.get_docstring(node) or "").partition("\n")[0])
                other = found.setdefault(node.name, entry)
                if other is not entry:
                    where = f"{other.module} and {entry.module}"
                    raise UserError(f"two {mark}s are called {node.name!r}, in {where}; rename one")
    return dict(sorted(found.items()))


def check_name(name: str, also: Collection[str] | None = None) -> None:
    """Refuse a name that neither this package nor an installed one declares; those with a colon are left to `find`.

    Args:
        also: directories of runs and models, which are right, too; None: only an experiment is.

    Raises:
        UserError: there is no such experiment; says how a file's function or a run directory that is there is named,
            or gives the nearest names.
    """
    if ":" in name or name in entries() or name in recipes() or name in installed("experiments"):
        return
    path = Path(name)
    file = path if path.suffix == ".py" else path.with_name(f"{path.name}.py") if path.name else path
    if file.is_file():
        named = [f"{file}:{function}" for function in _functions(file)]
        right = f"name one of its functions: {', '.join(named)}" if named else "it has no public function"
        raise UserError(f"no experiment {name!r}; {file} is a file: {right}")
    if (path / "config.txt").is_file():
        raise UserError(f"no experiment {name!r}; it is a run directory: name its experiment, with --run-dir {name}")
    if path.suffix == ".py":
        near = did_you_mean(path.name, [one.name for one in path.parent.glob("*.py")])
        raise UserError(f"no file {name}{near}; expected FILE.py:FUNCTION, or an experiment's name")
    if same := [one for one in also or () if Path(one).name == name]:
        raise UserError(f"no directory or experiment {name!r}{did_you_mean(name, same)}")
    what = "experiment" if also is None else "run directory, model's directory or experiment"
    known = [*(also or ()), *entries(), *recipes(), *installed("experiments")]
    raise UserError(f"no {what} {name!r}{did_you_mean(name, known)}")


def _functions(file: Path) -> list[str]:
    """Return the functions of a file that may be experiments: those that are marked, or else all that are public."""
    try:
        nodes = [node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    marked = [node.name for node in nodes if any(_marks(decorator, "experiment") for decorator in node.decorator_list)]
    return marked or [node.name for node in nodes if not node.name.startswith("_")]


def find(name: str) -> Callable[..., ConfigBase[Any]]:
    """The function behind a name, `path/to/file.py:function` or `package.module:function`.

    A file or package that is named so is trusted (see `axlearn_like.config.trusted_code`).

    Raises:
        UserError: there is none; gives the nearest names.
    """
    check_name(name)
    if name in recipes():
        return importlib.import_module("experiments.recipes.composed").recipe_experiment(name)
    if name in entries():
        return getattr(importlib.import_module(entries()[name].module), name)
    if ":" not in name:
        name = place_of("experiments", name)
    place, _, function_name = name.rpartition(":")
    module = import_place(place)
    function = getattr(module, function_name, None)
    if not inspect.isfunction(function):
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise UserError(f"{place} has no function {function_name!r}{did_you_mean(function_name, functions)}")
    return function


_OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def get(name: str, **arguments: Any) -> ConfigBase[Any]:
    """The config of an experiment; its errors call the root by the experiment's name.

    Raises:
        UserError: there is no such experiment (gives the nearest names), it takes no such argument, or its function
            returns something else than a config.
    """
    function = find(name)
    parameters = inspect.signature(function).parameters
    for argument in arguments:
        if argument not in parameters:
            hint = did_you_mean(argument, parameters)
            raise UserError(f"experiment {name!r} takes no argument {argument!r}; use --set path=value{hint}")
    given = {n for n, p in parameters.items() if n in arguments or p.default is not p.empty or p.kind in _OPTIONAL}
    if needed := [n for n in parameters if n not in given]:
        raise UserError(f"experiment {name!r}: its function needs {', '.join(needed)}; expected a default of each")
    cfg = function(**arguments)
    if not isinstance(cfg, ConfigBase):
        raise ConfigError(f"experiment {name!r} returned {cfg!r}, not a config", function.__name__)
    return label(cfg, function.__name__)


def _marks(decorator: ast.expr, mark: str) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (isinstance(target, ast.Name) and target.id == mark) or (
        isinstance(target, ast.Attribute) and target.attr == mark
    )
