"""The search for an interpreter: candidates are run, not believed."""

import subprocess
import sys
from pathlib import Path

import pytest

OLD = "#!/bin/sh\nexit 10\n"
REFUSES = '#!/bin/sh\necho "pyenv: $0: command not found" >&2\nexit 127\n'
NO_VENV = "#!/bin/sh\necho 3.12\nexit 11\n"
GOOD = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'


class Machine:
    """A PATH and a home folder with given interpreters."""

    def __init__(self, root: Path, checkout: Path) -> None:
        self.path, self.home = root / "bin", root / "home"
        self.script = checkout / "tools" / "find_python.sh"
        self.path.mkdir()
        self.home.mkdir()

    def put(self, name: str, body: str) -> None:
        """Put an executable on PATH, or with a slash in its name under the home folder."""
        file = self.home / name if "/" in name else self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(body)
        file.chmod(0o755)

    def find(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the search; ls, sed and sort come from the system, no Python does."""
        for tool in ("ls", "sed", "sort", "cat"):
            if not (self.path / tool).exists():
                (self.path / tool).symlink_to(
                    next(p for p in (Path("/usr/bin") / tool, Path("/bin") / tool) if p.exists())
                )
        environment = {"PATH": str(self.path), "HOME": str(self.home), **variables}
        return subprocess.run(
            ["/bin/sh", str(self.script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def machine(tmp_path: Path, checkout: Path) -> Machine:
    return Machine(tmp_path, checkout)


def test_python3_is_taken_if_it_is_new_enough(machine: Machine) -> None:
    machine.put("python3", GOOD)
    assert machine.find().stdout.strip() == sys.executable


def test_a_shim_that_refuses_and_an_old_python3_are_passed_over(machine: Machine) -> None:
    machine.put("python3.12", REFUSES)
    machine.put("python3", OLD)
    machine.put(".pyenv/versions/3.12.4/bin/python", GOOD)
    assert machine.find().stdout.strip() == sys.executable


def test_the_newest_patch_of_pyenv_comes_first(machine: Machine) -> None:
    machine.put(".pyenv/versions/3.12.10/bin/python", GOOD)
    machine.put(".pyenv/versions/3.12.9/bin/python", "#!/bin/sh\necho /bin/sh\n")
    machine.put(".pyenv/versions/3.11.9/bin/python", "#!/bin/sh\necho /bin/sh\n")
    assert machine.find().stdout.strip() == sys.executable


def test_without_any_it_says_what_to_install(machine: Machine) -> None:
    machine.put("python3", OLD)
    done = machine.find()
    assert (done.returncode, done.stdout) == (1, "")
    assert "No Python >= 3.12 found" in done.stderr


def test_a_missing_venv_module_is_named(machine: Machine) -> None:
    machine.put("python3", NO_VENV)
    done = machine.find()
    assert done.returncode == 1
    assert "python3.12-venv" in done.stderr


def test_a_named_interpreter_is_not_replaced_by_another(machine: Machine) -> None:
    machine.put("python3", GOOD)
    machine.put("mine", OLD)
    done = machine.find(PYTHON=str(machine.path / "mine"))
    assert done.returncode == 1
    assert "mine" in done.stderr
