"""The archive of the code: named by its content, with the user's own files, and the same code when it is unpacked."""

import io
import os
import py_compile
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import yaml

from mesh import UserError
from tools.launch.bundle import make_bundle
from tools.launch.launch import Launch
from tools.launch.machines.capacity import Capacity
from tools.launch.plan import LaunchPlan, Role
from tools.launch.script import axl_command
from tools.launch.submission import render, submission, write

CFG = Launch.Config(experiment="demo", devices="v6e:1x1")
PLAN: LaunchPlan = LaunchPlan("demo", "train", CFG, (), None, (), (), 0.0)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkout of two files."""
    for name, text in {"pyproject.toml": "", "mesh/a.py": "a = 1\n", "mesh/.env": "secret", "tests/t.py": ""}.items():
        (tmp_path / "small" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "small" / name).write_text(text)
    return tmp_path / "small"


def names(content: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return archive.getnames()


def test_the_same_code_has_the_same_name_and_another_has_another(small: Path):
    first = make_bundle(CFG, {}, root=small)
    os.utime(small / "mesh" / "a.py", (0, 0))
    assert make_bundle(CFG, {}, root=small) == first
    assert names(first.content) == ["mesh/a.py", "pyproject.toml"]  # no hidden files, no tests
    assert make_bundle(CFG, {"launch/config.txt": "x"}, root=small).digest != first.digest
    (small / "mesh" / "a.py").write_text("a = 2\n")
    assert make_bundle(CFG, {}, root=small).digest != first.digest


def test_a_run_on_this_machine_has_the_byte_code_that_is_there(small: Path):
    source = small / "mesh" / "a.py"
    local = CFG.clone(on="local", storage="dir:/runs")
    plain = make_bundle(local, {}, root=small)
    os.utime(source, (0, 0))
    cached = Path(py_compile.compile(str(source), doraise=True) or "")
    made, name = make_bundle(local, {}, root=small), f"mesh/__pycache__/{cached.name}"
    assert names(made.content) == ["mesh/__pycache__/" + cached.name, "mesh/a.py", "pyproject.toml"]
    assert made.digest == plain.digest == make_bundle(CFG, {}, root=small).digest, "it is named by the code"
    assert name not in names(make_bundle(CFG, {}, root=small).content), "another machine may have another Python"
    folder = small.parent / "unpacked"
    with tarfile.open(fileobj=io.BytesIO(made.content)) as archive:
        archive.extractall(folder, filter="data")
    ask = [sys.executable, "-v", "-c", "import sys; sys.path.insert(0, 'mesh'); import a; print(a.a)"]
    done = subprocess.run(ask, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n" and f"matches {folder}/mesh/a.py" in done.stderr.replace(f"{folder}/mesh/../", "")
    (folder / "mesh" / "a.py").write_text("a = 2\n")  # valid by content, not by time
    done = subprocess.run(ask, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
    os.utime(source, (1, 1))
    assert name not in names(make_bundle(local, {}, root=small).content), "it was of another source"
    later = time.time() + 5
    os.utime(source, (later, later))
    py_compile.compile(str(source), doraise=True)
    assert name not in names(make_bundle(local, {}, root=small).content), "it may be of another source"


def test_local_changes_are_said_in_one_line(small: Path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(small), *identity, *arguments], check=True, capture_output=True)

    assert make_bundle(CFG, {}, root=small).summary.endswith("; not under git")
    git("init")
    git("add", "mesh/a.py", "pyproject.toml")
    git("commit", "-m", "a")
    (small / "mesh" / "a.py").write_text("a = 2\n")
    (small / "mesh" / "b.py").write_text("b = 2\n")
    (small / "mesh" / ".env").unlink()
    summary = make_bundle(CFG, {}, root=small).summary
    assert summary.endswith("1 changed and 1 untracked files, as they are on disk") and "\n" not in summary


def test_files_of_the_users_own_are_in_it_under_the_name_that_the_command_uses(small: Path, tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text("def f(): ...\n")
    cfg = CFG.clone(experiment=f"{mine}:f")
    made = make_bundle(cfg, {}, root=small)
    assert "user/mine.py" in names(made.content) and "1 of yours (mine.py)" in made.summary
    assert "/opt/axl/user/mine.py:f" in axl_command(cfg, PLAN)
    (tmp_path / "other").mkdir()
    shutil.copy(mine, tmp_path / "other" / "mine.py")
    with pytest.raises(UserError, match="have one name"):
        make_bundle(cfg.clone(applied=(f"{tmp_path / 'other' / 'mine.py'}:f",)), {}, root=small)
    with pytest.raises(UserError, match="expected FILE.py:FUNCTION"):
        make_bundle(CFG.clone(experiment="my_package.mine:f"), {}, root=small)


def test_files_that_a_command_names_travel_along_and_its_words_say_where_they_are(small: Path, tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text("def f(): ...\n")
    words = (
        "eval",
        "demo",
        "--code",
        str(mine),
        "--verifier",
        f"{mine}:f",
        "--set",
        f"a.b={mine}:f",
        "--tasks",
        "x=y.py.gz",
    )
    cfg = Launch.Config(command=words)
    assert "user/mine.py" in names(make_bundle(cfg, {}, root=small).content)
    plan = LaunchPlan("eval-demo", "eval", None, (), None, (), (), 0.0, words)
    there = "/opt/axl/user/mine.py"
    expected = ["eval", "demo", "--code", there, "--verifier", f"{there}:f", "--set", f"a.b={there}:f"]
    assert axl_command(cfg, plan)[3:] == [*expected, "--tasks", "x=y.py.gz"]
    assert axl_command(cfg.clone(bundle=False, image="mine"), plan)[3:] == list(words)


def test_code_without_its_checkout_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no checkout .*launch.bundle=False"):
        make_bundle(CFG, {}, root=tmp_path)


@pytest.mark.slow
def test_the_written_folder_holds_one_submission_whose_code_runs(tmp_path: Path, checkout: Path):
    folder = tmp_path / "out"
    for name in ("first", "second"):
        cfg = Launch.Config(experiment="demo_sft", name=name, devices="v6e:1x1")
        files, made = submission(cfg, LaunchPlan(name, "train", cfg, (), None, (), (), 0.0))
        write(folder, files, made)
    assert made is not None and [path.name for path in folder.glob("*.tar.gz")] == [made.file_name]
    with tarfile.open(folder / made.file_name) as archive:
        archive.extractall(tmp_path / "code", filter="data")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "code"), "PYTHONSAFEPATH": "1"}
    code = "import tools.launch.process as p; print(p.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, cwd=tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "code"), done.stderr
    script = subprocess.run(["bash", "-n", str(folder / "submit.sh")], capture_output=True, text=True)
    assert script.returncode == 0, script.stderr
    first = subprocess.run(["bash", str(folder / "submit.sh")], capture_output=True, text=True)
    assert first.returncode == 1 and f"copy {made.file_name} to /axl/bundles/{made.file_name}" in first.stderr


def test_the_clusters_reader_of_yaml_sees_no_number_in_a_text():
    """A YAML 1.2 reader takes 12e3 for a number, where PyYAML, of YAML 1.1, does not."""
    cfg = CFG.clone(env={"A": "12e3", "B": "true", "C": "x\ny"})
    roles = (Role("head", 1, Capacity("on-demand")),)
    text = render(cfg, LaunchPlan("demo", "train", cfg, (), None, roles, (), 0.0), "1" * 16)["head.yaml"]
    assert "value: '12e3'" in text and "value: 'true'" in text
    (env,) = [
        one["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
        for one in yaml.safe_load_all(text)
    ]
    assert {"name": "C", "value": "x\ny"} in env
