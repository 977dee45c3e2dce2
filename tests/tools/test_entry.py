"""The entry of the command line, in folders of users with names of ours in them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def axl(*words: str, cwd: Path, path: str) -> "subprocess.CompletedProcess[str]":
    """Run the entry that the installed `axl` calls."""
    command = [sys.executable, "-P", "-m", "axlearn_like", *words]
    return subprocess.run(command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


@pytest.mark.parametrize("form", ["models/__init__.py", "tools/__init__.py", "mesh.py"])
def test_a_package_of_ours_that_is_hidden_is_named(form: str, tmp_path: Path, checkout: Path) -> None:
    hiding = tmp_path / form
    hiding.parent.mkdir(exist_ok=True)
    hiding.touch()
    done = axl("--help", cwd=tmp_path, path=f"{tmp_path}{os.pathsep}{checkout}")
    name = form.partition("/")[0].removesuffix(".py")
    place = hiding if form.endswith(f"{name}.py") else hiding.parent
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"package {name!r}, expected in {checkout / name}, is hidden by {place}; rename" in done.stderr


def test_a_folder_without_code_hides_nothing(tmp_path: Path, checkout: Path) -> None:
    (tmp_path / "models").mkdir()
    done = axl("--version", cwd=tmp_path, path=f"{tmp_path}{os.pathsep}{checkout}")
    assert done.returncode == 0, done.stderr
