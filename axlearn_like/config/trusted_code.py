"""The code that a config's text may name, so that a text that came from elsewhere cannot run what it likes.

Always: configs of this project's packages, and functions that are declared for it (declared.py). A user's own code:
the files (`path/mine.py`) and packages (`mylab`) that the user has named on a command line, or by `trust` in a program.
`axl` remembers those in a file of the user's, outside of any run directory. Processes that are started inherit them by
the environment variable AXL_CODE. Beside those, what installed packages declare by entry points (declared.py).
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from axlearn_like.config.consent import add_to_memory, user_memory
from axlearn_like.config.declared import (
    LIBRARIES,
    declared_in_library,
    declared_in_package,
    is_ours_declared,
    nearest_declared,
)
from axlearn_like.config.errors import ImportNameError
from mesh.errors import UserError, did_you_mean

OWN = ("axlearn_like", "experiments", "mesh", "models", "rl")
_EXPECTED = f"{', '.join(OWN)}, declared functions of jax and optax"
KNOWN = {*OWN, *(module.partition(".")[0] for module in LIBRARIES)}  # trusted as far as they are declared
VARIABLE = "AXL_CODE"
_MEMORY = "code.txt"

_files: dict[str, Path] = {}  # module -> its file, of a user's files
_offered: dict[str, str] = {}  # module -> the file or package that a text says it is from


def trust(place: str | Path) -> str:
    """Let configs name the objects of a file `path/mine.py`, or of a package by any module of it.

    A file's folder is put at the end of the import path. Processes started from now on trust it as well.

    Returns:
        The name of the module to import.

    Raises:
        UserError: there is no such file, or its name is that of another module.
    """
    module = _trust(str(place))
    kept = os.environ.get(VARIABLE, "").split(os.pathsep)
    place = str(_files.get(module, _root(module)))
    if place not in kept:
        os.environ[VARIABLE] = os.pathsep.join([*filter(None, kept), place])
    return module


def import_place(place: str) -> ModuleType:
    """Import the file or module that the user has named, and trust it (UserError: it cannot be found)."""
    name = trust(place)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        hidden = _files[name].parent / _root(missing) if name in _files else None
        if hidden is not None and hidden.is_dir() and _root(missing) in (*OWN, "tools"):
            raise UserError(
                f"{place} imports {missing!r}, but the name {_root(missing)!r} belongs to a package of this project; "
                f"rename your folder {hidden}"
            ) from error
        if not name.startswith(missing):
            raise  # an import inside the module: its own error
        file = Path(f"{name.replace('.', '/')}.py")
        hint = f"; a file is named with its ending: {file}" if file.is_file() else ""
        raise UserError(f"no module {missing!r} (in {place!r}){hint}") from error


def check_module(name: str, where: str) -> None:
    """Refuse the name `module:object` of a text unless its module may be imported for it; imports nothing.

    Raises:
        ImportNameError: names the module and how to trust it.
    """
    module = name.partition(":")[0]
    root = _root(module)
    ours = root in OWN and "__" not in module  # axlearn_like.__main__ is started, not imported
    if ours or declared_in_library(name) or root in _trusted_roots() or declared_in_package(name):
        return
    if root in _offered and not Path(_offered[root]).is_file():
        how = f"{_offered[root]} is not there any more; say where it is now: --code PATH/{root}.py"
    elif root in _offered:
        how = f"it is from {_offered[root]}; if you trust that file, add --code {_offered[root]}"
    elif root in KNOWN:
        how = f"of {root}, what is declared in axlearn_like/config/declared.py{nearest_declared(name)}"
    elif root in sys.stdlib_module_names:  # no advice to trust it: this is how a hostile config would run a command
        how = f"expected {_EXPECTED}, or a file of yours; it is of Python's standard library"
    else:
        how = f"expected {_EXPECTED}, or a file or package of yours that you trust: --code {root}"
    raise ImportNameError(f"{where}: a config may not name {name!r}: {how}", where)


def check_object(found: Any, name: str, where: str, *, written: bool = False) -> None:
    """Refuse what `name` leads to unless it was declared, or is defined in code that the user trusts.

    Args:
        written: a program writes the name of what it has: code that is neither ours nor a library's is the user's own.

    Raises:
        ImportNameError: names it, and the nearest declared names.
    """
    if declared_in_library(name) or is_ours_declared(found) or declared_in_package(name):
        return
    home = str(getattr(found, "__module__", None))  # a trusted module has names of others, such as subprocess.run
    if (written and _root(home) not in KNOWN) or _root(home) in _trusted_roots():
        return
    raise ImportNameError(
        f"{where}: a config may not name {name!r}: expected a config, a function that @config_function declares, or "
        f"one of a file or package of yours{nearest_declared(name)}",
        where,
    )


def file_of(module: str) -> Path | None:
    """The user's file behind a module, if it is one."""
    return _files.get(_root(module))


def offer(place: str) -> None:
    """Note the file that a text names objects of; it is trusted if the user has named it before."""
    _offered[Path(place).stem] = place
    if Path(place).is_file() and place in _remembered():
        trust(place)


def remember(place: str) -> None:
    """Trust a file or package, now and in later commands of this user."""
    module = trust(place)
    place = str(_files.get(module, _root(module)))
    add_to_memory(_MEMORY, place)


def _trust(place: str) -> str:
    if not place.endswith(".py"):
        _offered.pop(_root(place), None)
        return place
    path = Path(place).resolve()
    if not path.is_file():
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.py")])
        raise UserError(f"no file {path}{near}")
    name = path.stem
    if _files.get(name) != path:
        if name in _files and name not in sys.modules:  # another file of that name, which was not imported
            folder = str(_files.pop(name).parent)
            sys.path[:] = [entry for entry in sys.path if entry != folder]
        loaded = sys.modules.get(name)
        found = getattr(loaded, "__spec__", None) if loaded else importlib.util.find_spec(name)
        if loaded or found:
            origin = found.origin if found else None
            if origin is None or Path(origin).resolve() != path:
                at = f" ({origin})" if origin else ""
                raise UserError(f"{path}: there is already a module {name!r}{at}; rename the file")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
            importlib.invalidate_caches()
        _files[name] = path
    return name


def _trusted_roots() -> set[str]:
    """Packages and modules that are trusted by the environment, to which `trust` adds, or remembered."""
    places = [place for place in os.environ.get(VARIABLE, "").split(os.pathsep) if place]
    roots = {_trust(place) for place in places if not place.endswith(".py") or Path(place).is_file()}
    return {_root(name) for name in roots | {place for place in _remembered() if not place.endswith(".py")}}


def _remembered() -> list[str]:
    return user_memory(_MEMORY)


def _root(module: str) -> str:
    return module.partition(".")[0]
