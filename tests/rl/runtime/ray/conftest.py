"""One Ray session, and undisturbed runs to compare with, for the tests of this folder: each takes seconds."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl.runtime.node.warm import VARIABLE
from rl.runtime.ray.session import ray_session
from tests.rl.runtime.ray.command import ROOT
from tests.rl.runtime.ray.experiments import run_here
from tests.rl.tiny import tiny_experiment

HERE = "tests/rl/runtime/ray/"
WARM = """
import os, sys
from rl.runtime.node.warm import VARIABLE, serve_node
os.environ[VARIABLE] = sys.argv[1]
with serve_node():
    print(flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="package")
def warm_interpreter() -> Iterator[dict[str, str]]:
    """Start an interpreter from which roles are forked; yields the variable that a raylet needs for it."""
    with tempfile.TemporaryDirectory(prefix="axl-warm-", dir="/tmp") as folder:  # sockets need short paths
        path = f"{folder}/socket"
        command = [sys.executable, "-c", WARM, path]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
            assert started.stdout is not None and started.stdout.readline()
            yield {VARIABLE: path}
            started.communicate()


@pytest.fixture(scope="package")
def shared_session(warm_interpreter: dict[str, str]) -> Iterator[None]:
    """Open the session, or use it if another test of this folder has opened it."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(*next(iter(warm_interpreter.items())))
            stack.enter_context(ray_session())
        yield


@pytest.fixture(scope="package")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the run in one process with this number of updates and staleness, made once."""
    made: dict[tuple[int, int], Path] = {}

    def get(num_steps: int, staleness: int = 0) -> Path:
        if (num_steps, staleness) not in made:
            cfg = tiny_experiment(num_steps=num_steps, staleness=staleness)
            made[num_steps, staleness] = run_here(tmp_path_factory.mktemp("baseline"), cfg)
        return made[num_steps, staleness]

    return get


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the shared session behind the others of this folder, which open sessions of their own."""
    places = [place for place, item in enumerate(items) if item.nodeid.startswith(HERE)]
    here = sorted(
        (items[place] for place in places), key=lambda item: "shared_session" in getattr(item, "fixturenames", ())
    )
    for place, item in zip(places, here, strict=True):
        items[place] = item
