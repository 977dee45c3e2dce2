"""Private names of other packages stand in one file for each, which says for which versions they were read."""

import ast
import importlib
from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.specifiers import SpecifierSet

from tests.test_floors import FLOORS, ROOT

INTERNALS = (
    "mesh/programs/jax_internals.py",
    "axlearn_like/kernels/attention/splash_internals.py",
    "rl/runtime/node/start.py",
)
PUBLIC = {"os._exit", "_replace", "_fields"}  # documented, for all their underscore


def private_uses(source: str) -> list[str]:
    """Return one line for each private name of another package that a file imports or reads from a module of it."""
    tree, modules, found = ast.parse(source), set[str](), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                path = f"{origin}{alias.name}"
                if path.split(".")[0] not in FLOORS:
                    modules.add(alias.asname or alias.name.split(".")[0])
                    found += [f"{node.lineno}: {path}"] if _is_private(path) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in PUBLIC:
            path = ast.unparse(node)
            if path.split(".")[0] in modules and path not in PUBLIC:
                found.append(f"{node.lineno}: {path}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            name = node.args[0]
            if isinstance(name, ast.Constant) and _is_private(str(name.value)):
                found.append(f"{node.lineno}: {name.value}")
    return found


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def test_private_names_stand_in_their_files_alone() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(path for room in FLOORS for path in (ROOT / room).rglob("*.py")):
        if uses := private_uses(path.read_text(encoding="utf-8")):
            found[path.relative_to(ROOT).as_posix()] = uses
    assert set(found) == set(INTERNALS), f"use what {INTERNALS} offer, or add to them: {found}"


@pytest.mark.parametrize("path", INTERNALS)
def test_the_installed_version_is_one_that_was_checked(path: str) -> None:
    internals = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    try:
        installed = version(internals.PACKAGE)
    except PackageNotFoundError:
        pytest.skip(f"{internals.PACKAGE} is not installed")
    assert installed in SpecifierSet(internals.CHECKED), (
        f"{internals.PACKAGE} {installed} is installed, and {path} was checked with {internals.CHECKED}: compare each "
        f"of its functions with the new source of {internals.PACKAGE}, run their tests, then widen CHECKED"
    )


@pytest.mark.parametrize("path", INTERNALS[:2])
def test_the_project_asks_for_the_versions_that_were_checked(path: str) -> None:
    internals = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert f'"{internals.PACKAGE}{internals.CHECKED}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "source",
    [
        "from jax._src import compiler",
        "import jax._src.core",
        "def f():\n    from jax.lax import _reduce_sum",
        "import jax\njax.core._hidden(1)",
        'from importlib import import_module\nx = import_module("orbax._src.ops")',
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert len(private_uses(source)) == 1


def test_public_names_are_not() -> None:
    source = "import os, jax\nfrom mesh.rules import _own\nos._exit(0)\njax.numpy.sum(x)\nself._x = jax.__version__"
    assert private_uses(source) == []
