"""The script of a container: it unpacks the code and starts a process of the run in it."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tools.launch import script
from tools.launch.launch import Launch


def test_the_script_unpacks_the_code_and_starts_the_process_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "CODE", str(tmp_path / "code"))
    (tmp_path / "marker").write_text("unpacked")
    with tarfile.open(tmp_path / "axl.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "marker", "marker")
    cfg = Launch.Config(experiment="demo", tpu="v6e:1x1", setup="touch installed")
    text = script.bootstrap(cfg, tmp_path / "axl.tar.gz")
    arguments = ["train", "--name", "x", "--run-dir", str(tmp_path), "--", "cat", "marker"]
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(script.__file__).parents[2]),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def run(text: str) -> "subprocess.CompletedProcess[str]":
        command = ["/bin/bash", "-c", text, "axl", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60)

    done = run(text)
    assert (done.returncode, done.stdout) == (0, "unpacked"), done.stderr
    assert (tmp_path / "code" / "installed").exists()
    # pip ends with 2 where a package cannot be installed: no mistake of the experiment.
    assert (
        run(script.bootstrap(cfg.clone(setup="exit_2() { return 2; }; exit_2"), tmp_path / "axl.tar.gz")).returncode
        == 70
    )
