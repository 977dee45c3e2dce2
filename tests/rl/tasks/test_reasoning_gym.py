"""reasoning-gym imports with and without its C extension, and only then."""

import subprocess
import sys

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


def test_without_pycosat_everything_but_its_puzzles_works():
    out = run(
        HIDE_PYCOSAT
        + """
from rl.tasks.reasoning_gym import import_reasoning_gym
gym = import_reasoning_gym()
print(gym.create_dataset("chain_sum", seed=1)[0]["answer"])
import pycosat
print(hasattr(pycosat, "__path__"))
try:
    gym.create_dataset("zebra_puzzles", seed=1)[0]
except ImportError as error:
    print(error)
"""
    ).splitlines()
    assert out[0].lstrip("-").isdigit()
    assert out[1] == "False"
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
