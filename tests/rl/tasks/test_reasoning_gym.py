"""reasoning-gym imports with and without its C extension, and only then."""

import subprocess
import sys

import pytest

from rl.tasks.reasoning_gym import import_reasoning_gym

HIDE_PYCOSAT = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "pycosat":
            raise ModuleNotFoundError("No module named 'pycosat'", name=name)
sys.meta_path.insert(0, Hide())
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_without_pycosat_everything_but_its_puzzles_works():
    out = run(
        HIDE_PYCOSAT
        + """
from rl.tasks.reasoning_gym import import_reasoning_gym
gym = import_reasoning_gym()
print("matplotlib" in sys.modules or "cellpylib" in sys.modules)
print(gym.create_dataset("chain_sum", seed=1)[0]["answer"])
try:
    gym.create_dataset("zebra_puzzles", seed=1)[0]
except ImportError as error:
    print(error)
"""
    ).splitlines()
    assert out[0] == "False"  # libraries that few families call are imported when they do
    assert out[1].lstrip("-").isdigit()
    assert out[2].startswith("pycosat.itersolve is needed by reasoning_gym.logic.contrib")


def test_importing_the_tasks_does_not_import_reasoning_gym():
    code = "import sys, rl.tasks.mixture, rl.verification.service; print('reasoning_gym' in sys.modules)"
    assert run(code) == "False"


def test_a_missing_reasoning_gym_is_named():
    code = HIDE_PYCOSAT.replace("pycosat", "reasoning_gym") + (
        "from rl.tasks.reasoning_gym import import_reasoning_gym\n"
        "try: import_reasoning_gym()\n"
        "except ImportError as error: print(error)\n"
    )
    assert "pip install reasoning-gym" in run(code)


@pytest.mark.slow
def test_a_library_that_is_imported_later_is_the_real_one():
    gym = import_reasoning_gym()
    from reasoning_gym.algorithmic import game_of_life

    assert callable(game_of_life.cpl.evolve2d) and game_of_life.cpl.__name__ == "cellpylib"
    assert len(gym.create_dataset("game_of_life", seed=1, size=1)[0]["answer"]) > 0
    assert sys.modules["cellpylib"].evolve2d is game_of_life.cpl.evolve2d
