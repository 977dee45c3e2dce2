"""A run in a directory where others may write: what they planted is not followed, and theirs is asked about."""

import json
import os
import stat
from pathlib import Path

import pytest

from axlearn_like.run.directory import RunDirectory, RunDirectoryError
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import MetricsWriter
from mesh.errors import UserError
from tests.mesh.files.test_written import AS_ROOT, OTHER, PLANTED

CONFIG = "trainer: T\nnum_steps: 10\n"
FILES = ("run.lock", "config.txt", "config.txt.tmp", "metrics.jsonl", "events.jsonl", "checkpoints", "rollouts")


def write(path: Path, force: bool = False) -> None:
    """Do what a run does first."""
    with RunDirectory.open(path, CONFIG, force=force) as run:
        EventLog(run.events_path).append("trainer", "began")
        writer = MetricsWriter(run.path)
        writer.write(1, {"loss": 1.0})
        writer.close()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("force", [False, True])
def test_what_was_planted_is_not_followed(name: str, file: str, force: bool, tmp_path: Path) -> None:
    """The run goes on without it or says what is in the way; it writes nowhere else, and never waits for a reader."""
    target, run = tmp_path / "theirs" / "target", tmp_path / "run"
    target.parent.mkdir()
    target.write_text("kept")
    write(run)
    place = run / file
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    PLANTED[name](place, target)
    if file != "config.txt":
        (run / "config.txt").write_text(CONFIG)
    try:
        write(run, force)
    except UserError as error:
        assert str(run) in str(error)
    except OSError as error:
        assert error.filename is not None and name == "a folder"
    assert target.read_text() == "kept"
    assert os.listdir(target.parent) == ["target"] or file in ("checkpoints", "rollouts")


def test_a_run_directory_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(tmp_path / "a" / "run")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert modes == dict.fromkeys(("config.txt", "metrics.jsonl", "events.jsonl", "run.lock"), 0o600)
    assert stat.S_IMODE((tmp_path / "a" / "run").stat().st_mode) == 0o700


@AS_ROOT
def test_the_directory_of_another_user_needs_force(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run)
    os.chown(run, OTHER, OTHER)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(RunDirectoryError, match=rf"run belongs to user {OTHER}, .* run of user 'root' .* or --force"):
        write(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    write(run, force=True)


def test_what_a_strangers_undo_file_names_is_not_written(tmp_path: Path) -> None:
    """Only files of the run are put back, whatever names it has."""
    run = tmp_path / "run"
    write(run)
    names = ("../secret", str(tmp_path / "secret"), "config.txt")
    kept = {"files": dict.fromkeys(names, "taken"), "sizes": {"../secret": 0}, "progress": []}
    for content in (json.dumps(kept), "[" * 100_000, "{}", "3", '{"files": 3}', "\xff"):
        (run / ".undo.json").write_text(content)
        write(run)
        assert not (run / ".undo.json").exists() and os.listdir(tmp_path) == ["run"]
        assert (run / "config.txt").read_text() == CONFIG
