"""The control plane that a simulation runs knows of no time but that of an injected clock."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
ROOMS = ("rl/controller", "rl/fleet", "rl/runtime/supervision")
FILES = (
    "rl/parameter_server/broadcast.py",
    "rl/parameter_server/directory.py",
    "rl/parameter_server/pull/prefetcher.py",
    "rl/parameter_server/push/attempts.py",
    "rl/parameter_server/server.py",
    "rl/protocol/timeouts.py",
    "rl/rollout/leased_work.py",
    "rl/rollout/worker.py",
    "rl/training/publication.py",
    "rl/training/steps/policy_updates.py",
    "rl/training/steps/take.py",
)
FORBIDDEN = {"time", "monotonic", "sleep", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns"}


def own_times(source: str) -> list[int]:
    """Return the lines that import `time`, start a real timer, or name what only that module has."""
    found = []
    for node in ast.walk(ast.parse(source)):
        imports = isinstance(node, ast.Import) and any(one.name == "time" for one in node.names)
        imports |= isinstance(node, ast.ImportFrom) and node.module == "time"
        named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if named and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            imports |= (node.value.id, node.attr) in {("threading", "Timer"), *(("time", name) for name in FORBIDDEN)}
        if imports:
            found.append(getattr(node, "lineno", 0))
    return found


def test_the_control_plane_has_one_clock():
    paths = [path for room in ROOMS for path in sorted((ROOT / room).glob("**/*.py"))] + [ROOT / one for one in FILES]
    assert len(paths) > 35
    found = {path.relative_to(ROOT).as_posix(): own_times(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    ["import time", "from time import monotonic", "def f():\n    import time\n", "threading.Timer(1, print)"],
)
def test_what_has_a_time_of_its_own_is_found(source: str):
    assert own_times(source)
    assert not own_times("from axlearn_like.run.clock import REAL\nREAL.sleep(1)\nself.clock.timer(1, print)")
