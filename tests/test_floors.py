"""The plan of the house: imports go only down, and NNX's own transforms are not used.

Both rules are read from the source by `ast`, so that imports inside functions count too.
"""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.source_files import imports

FLOORS = {"mesh": 0, "axlearn_like": 1, "models": 2, "rl": 3, "experiments": 4, "tools": 5}

# Lifted transforms trace module graphs on every call (6-800 times the host time of a step); `sow`
# and the stateful optimizer hide state that a plain dict of arrays would show.
FORBIDDEN_NNX = frozenset(
    "jit jit_partial grad value_and_grad custom_vjp vjp jvp scan vmap pmap shard_map remat "
    "checkpoint cond switch while_loop fori_loop Optimizer ModelAndOptimizer List".split()
)

ROOT = Path(__file__).parent.parent


def floor_violations(source: str, module: str) -> list[str]:
    """Return one line for each import that goes up, or between rl and models, or to the tests."""
    room = module.split(".")[0]
    found = []
    for line, name, _ in imports(source, module):
        target = name.split(".")[0]
        if target == "tests":
            found.append(f"{module}:{line} imports {name}: tests are below nobody")
        elif target in FLOORS and FLOORS[target] > FLOORS[room]:
            found.append(f"{module}:{line} imports {name}: floor {FLOORS[room]} must not know floor {FLOORS[target]}")
        elif {room, target} == {"rl", "models"}:
            found.append(f"{module}:{line} imports {name}: rl and models do not know each other")
    return found


def nnx_violations(source: str, module: str) -> list[str]:
    """Return one line for each use of a forbidden name of flax.nnx."""
    found: list[str] = []
    if "nnx" not in source and "sow" not in source:
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            is_nnx = (isinstance(owner, ast.Name) and owner.id == "nnx") or (
                isinstance(owner, ast.Attribute) and owner.attr == "nnx"
            )
            if is_nnx and node.attr in FORBIDDEN_NNX:
                found.append(f"{module}:{node.lineno} uses nnx.{node.attr}")
            elif node.attr == "sow":
                found.append(f"{module}:{node.lineno} uses sow")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flax.nnx"):
            names = sorted(FORBIDDEN_NNX.intersection(alias.name for alias in node.names))
            found += [f"{module}:{node.lineno} imports nnx.{name}" for name in names]
    return found


def module_name(path: str) -> str:
    """Dotted name by which relative imports in the file resolve: a package keeps its `__init__`."""
    return path.removesuffix(".py").replace("/", ".")


@pytest.mark.parametrize("violations", [floor_violations, nnx_violations])
@pytest.mark.parametrize("room", FLOORS)
def test_no_file_of_a_room_breaks_the_rule(room: str, violations: Callable[[str, str], list[str]]) -> None:
    paths = sorted((ROOT / room).rglob("*.py"))
    assert paths
    modules = {module_name(path.relative_to(ROOT).as_posix()): path.read_text(encoding="utf-8") for path in paths}
    assert [line for module, source in modules.items() for line in violations(source, module)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mesh.rules", "import axlearn_like.config"),
        ("axlearn_like.training.trainer", "def f():\n    from rl.runtime.run import RLRun"),
        ("models.llama", "from rl import objective"),
        ("rl.controller.controller", "from models.llama import config"),
        ("experiments.demo", "if TYPE_CHECKING:\n    from tools.cli import main"),
        ("rl.objective.presets", "from ...models import llama"),
        ("rl.controller.ledger", "from tests.conftest import checkout"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(floor_violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tools.cli", "from mesh.errors import UserError\nimport experiments, rl.runtime.run, models"),
        ("rl.controller.controller", "from .ledger import Ledger\nfrom . import messages"),
        ("rl.objective.__init__", "from .presets import grpo"),
        ("mesh.mesh", "import jax\nfrom mesh import rules"),
    ],
)
def test_an_allowed_import_is_not(module: str, source: str) -> None:
    assert floor_violations(source, module) == []


@pytest.mark.parametrize(
    "source",
    [
        "@nnx.jit\ndef f(): ...",
        "g = flax.nnx.value_and_grad(f)",
        "from flax.nnx import Optimizer as Opt",
        "self.sow(nnx.Intermediate, 'loss', x)",
        "layers = nnx.List([])",
    ],
)
def test_a_forbidden_use_of_nnx_is_found(source: str) -> None:
    assert len(nnx_violations(source, "axlearn_like.x")) == 1


def test_functional_use_of_nnx_is_not() -> None:
    source = "graph, state = nnx.split(model)\njax.lax.scan(f, x)\nnnx.Param(jax.vmap(g)(x))"
    assert nnx_violations(source, "axlearn_like.x") == []
