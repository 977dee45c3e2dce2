"""A package of somebody else: its experiment, environment and verifier are found by name, and no more may be named."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

FILES = {
    "pyproject.toml": """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "mylab"
version = "1.2"
[project.entry-points."axl.experiments"]
short_words = "mylab.things:short_words"
[project.entry-points."axl.environments"]
one_guess = "mylab.things:one_guess"
[project.entry-points."axl.verifiers"]
vowels = "mylab.things:vowels"
""",
    "mylab/__init__.py": "",
    "mylab/things.py": '''
"""An experiment, an environment, and a reward."""

from experiments.demo.config import demo
from rl.environments.tool_environment import ToolEnvironment
from rl.environments.tools.calculator import Calculator


def short_words():
    """The demo in 7 updates."""
    return demo(steps=7)


def one_guess():
    """A calculator for one call."""
    return ToolEnvironment.Config(tools=(Calculator.Config(),), max_turns=1)


def vowels(answer, reference):
    """The share of vowels."""
    return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))


def undeclared(answer, reference):
    """A reward that no entry point names."""
    return 1.0
''',
}


class Environment:
    """Programs run where this checkout and the package are installed, with a home of their own."""

    def __init__(self, root: Path, checkout: Path):
        path = os.pathsep.join([str(root / "site"), str(checkout), sysconfig.get_path("purelib")])
        self.root = root
        self._variables = {**os.environ, "PYTHONPATH": path, "HOME": str(root), "JAX_PLATFORMS": "cpu"}
        self._variables.pop("AXL_CODE", None)

    def python(self, *words: str, status: int = 0) -> str:
        """Return all that a program prints."""
        command = [sys.executable, *words]
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self._variables,
            timeout=240,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def axl(self, *words: str, status: int = 0) -> str:
        """Return all that a command prints."""
        return self.python("-m", "axlearn_like", *words, status=status)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Environment:
    root = tmp_path_factory.mktemp("packages")
    for name, text in FILES.items():
        (root / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "source" / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(root / "site"), str(root / "source")], check=True, timeout=120)
    return Environment(root, checkout)


def test_an_experiment_is_listed_with_its_package_and_found_by_name(environment: Environment):
    (line,) = [line for line in environment.axl("config", "list").splitlines() if line.startswith("short_words")]
    assert line.split() == ["short_words", "mylab.things", "of", "mylab", "1.2"]
    assert "num_steps: 7" in environment.axl("config", "show", "short_words")
    assert "did you mean 'short_words'" in environment.axl("config", "show", "shrt_words", status=2)


@pytest.mark.full
def test_an_environment_is_a_modifier_by_its_name(environment: Environment):
    text = environment.axl("config", "show", "calculator_rl", "--apply", "one_guess")
    assert "environment.max_turns: 1" in text
    assert "did you mean 'one_guess'" in environment.axl(
        "config", "show", "calculator_rl", "--apply", "one_gues", status=2
    )


def test_a_text_may_name_what_is_declared_and_nothing_else_of_the_package(environment: Environment):
    code = "import sys; from axlearn_like.config.names import import_name as f; print(f(sys.argv[1]).__doc__)"
    assert environment.python("-c", code, "mylab.things:vowels") == "The share of vowels.\n"
    for name in ("mylab.things:undeclared", "mylab.things:demo", "mylab.things:vowels.__globals__"):
        assert "a config may not name" in environment.python("-c", code, name, status=1)


@pytest.mark.full
def test_a_reward_by_its_name_trains(environment: Environment):
    short = ("num_steps=1", "warm_start=None", "evaluation=None")
    sets = [word for edit in short for word in ("--set", edit)]
    said = environment.axl("rl", "demo", "--runtime", "inprocess", "--reward", "vowels", *sets, "--run-dir", "run")
    assert "mylab.things:vowels" in (environment.root / "run" / "config.txt").read_text(), said
