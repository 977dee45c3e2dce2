"""The script of a container: it unpacks the code and starts a process of the run in it."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tools.launch import script
from tools.launch.launch import Launch
from tools.launch.plan import Role


def test_the_script_unpacks_the_code_and_starts_the_process_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "CODE", str(tmp_path / "code"))
    monkeypatch.setattr(script, "bundle_path", lambda cfg, digest: tmp_path / "axl.tar.gz")
    (tmp_path / "marker").write_text("unpacked")
    with tarfile.open(tmp_path / "axl.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "marker", "marker")
    cfg = Launch.Config(experiment="demo", devices="v6e:1x1", setup="touch installed")
    role = Role("trainer", 1, cfg.terms("trainer"))
    arguments = ["train", "--name", "x", "--run-dir", str(tmp_path), "--", "cat", "marker"]
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(script.__file__).parents[2]),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def run(cfg: Launch.Config) -> "subprocess.CompletedProcess[str]":
        command = [*script.bootstrap(cfg, role, ""), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60)

    done = run(cfg)
    assert (done.returncode, done.stdout) == (0, "unpacked"), done.stderr
    assert (tmp_path / "code" / "installed").exists()
    # pip ends with 2 where a package cannot be installed: no mistake of the experiment.
    assert run(cfg.clone(setup="sleep() { :; }; exit_2() { return 2; }; exit_2")).returncode == 70


def test_what_fails_the_same_way_three_times_before_the_process_is_not_tried_again(tmp_path: Path):
    """An archive that is not there; a setup that fails in another way each time is tried for ever."""
    arguments = ["train", "--name", "x", "--run-dir", str(tmp_path / "a run"), "--", "true"]

    def run(archive: str, setup: str) -> tuple[int, str]:
        command = ["/bin/bash", "-c", script.BOOTSTRAP, "axl", str(tmp_path / "code"), archive, setup, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    statuses = [run(str(tmp_path / "a b.tar.gz"), "") for _ in range(4)]
    assert [status for status, _ in statuses] == [70, 70, 2, 70], "submitted again, it has its three attempts"
    assert "a b.tar.gz: Cannot open" in statuses[2][1]
    assert statuses[2][1].endswith("failed 3 times in the same way (status 2); it is not tried again\n")
    with tarfile.open(tmp_path / "axl.tar.gz", "w:gz"):
        pass
    different = "sleep() { command sleep 0.4; }; echo $RANDOM$RANDOM; false"  # long enough for the log to be written
    assert [run(str(tmp_path / "axl.tar.gz"), different)[0] for _ in range(4)] == [70] * 4
    record = next((tmp_path / "a run" / "launch" / "logs").glob("*.failed"))
    record.write_text("2$(touch hit)\nx[$(touch hit)]")
    assert run(str(tmp_path / "axl.tar.gz"), "sleep() { :; }; false")[0] == 70
    assert not Path("hit").exists()
