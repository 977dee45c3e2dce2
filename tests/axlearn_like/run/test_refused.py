"""A command that is refused leaves a run directory byte for byte as it was, with --force too."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.run.directory import RunDirectory, RunDirectoryError
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.trainer import Trainer
from mesh import UserError
from tests.axlearn_like.tiny import ROOT, tiny_model, tiny_trainer


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return all that is in a folder: content of files, None for folders."""
    found = {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in sorted(folder.rglob("*"))}
    return {name: content for name, content in found.items() if name != "run.lock" or content}


def larger(cfg: Trainer.Config) -> Trainer.Config:
    return cfg.set(model=tiny_model().set(vocab_size=48))


REFUSALS: dict[str, tuple[Callable[[Trainer.Config], Trainer.Config], bool]] = {
    "another config": (lambda cfg: cfg.set(seed=5), False),
    "another model, forced: its checkpoint is of the first": (larger, True),
    "an input of no rows, forced": (lambda cfg: cfg.set(input=cfg.input.clone(seq_len=10**6)), True),
    "fewer steps than were made": (lambda cfg: cfg.set(num_steps=1), False),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    tiny_trainer(2).build().run(path, progress=False)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_command_changes_nothing(trained: Path, name: str):
    change, force = REFUSALS[name]
    before = tree(trained)
    with pytest.raises(UserError):
        change(tiny_trainer(4)).build().run(trained, progress=False, force=force)
    assert tree(trained) == before
    assert tiny_trainer(2).build().run(trained, progress=False)["finished"], "the first command goes on as ever"


@pytest.mark.parametrize("made", ["", "some/folders/deep/"])
def test_a_refused_first_command_leaves_no_directory(tmp_path: Path, made: str):
    def run() -> None:
        with RunDirectory.open(tmp_path / f"{made}run", "a: 1\n") as run:
            run.resolved_config_path.write_text("a: 1\n")
            (run.path / "data.json").write_text("{}")
            raise UserError("refused after it was opened")

    with pytest.raises(UserError, match="refused after"):
        run()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError), RunDirectory.open(tmp_path / "there", "a: 1\n"):
        raise UserError("refused")
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and not list((tmp_path / "there").iterdir())


FORCED = """
import os, signal, sys
from pathlib import Path
from axlearn_like.run.directory import RunDirectory, RunDirectoryError
run = RunDirectory.open(sys.argv[1], sys.argv[2], force=True)
run.resolved_config_path.write_text("forced")
(run.path / "data.json").write_text("forced")
run.events_path.open("a").write("forced")
if sys.argv[3] == "got somewhere":
    (run.checkpoints / "3").mkdir()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("got", ["nowhere", "somewhere"])
def test_a_killed_command_leaves_no_forced_config_from_which_nothing_came(tmp_path: Path, got: str):
    """Killed between the forced config and the refusal that would have put the first one back."""
    with RunDirectory.open(tmp_path / "run", "a: 1\n") as run:
        run.resolved_config_path.write_text("a: 1\n")
        run.events_path.write_text("{}\n")
    before = tree(tmp_path)
    words = [str(tmp_path / "run"), "a: 2\n", f"got {got}"]
    assert subprocess.run([sys.executable, "-c", FORCED, *words], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "run" / "config.txt").read_text() == "a: 2\n", "as roles in other processes read it"
    killed = tree(tmp_path)
    read = RunDirectory.attach(tmp_path / "run").read_config()
    assert read == ("a: 1\n" if got == "nowhere" else "a: 2\n") and tree(tmp_path) == killed, "commands that only read"
    if got == "nowhere":
        with pytest.raises(RunDirectoryError, match="another config"):
            RunDirectory.open(tmp_path / "run", "a: 3\n")
        assert tree(tmp_path) == before
        RunDirectory.open(tmp_path / "run", "a: 1\n").close()
    else:
        RunDirectory.open(tmp_path / "run", "a: 2\n").close()
        assert (tmp_path / "run" / "data.json").read_text() == "forced"
        with pytest.raises(RunDirectoryError, match="another config"):
            RunDirectory.open(tmp_path / "run", "a: 1\n")
    assert not list(tmp_path.rglob(".undo*"))


def test_while_a_forced_command_goes_on_its_config_is_read(tmp_path: Path):
    """Roles in other processes read it before anything has come of it."""
    RunDirectory.open(tmp_path, "a: 1\n").close()
    with RunDirectory.open(tmp_path, "a: 2\n", force=True) as run:
        assert RunDirectory.attach(tmp_path).read_config() == run.read_config() == "a: 2\n"


@pytest.mark.parametrize("owner", ['{"pid": "x", "host": "h", "started": 1}', '{"pid": 1e99, "host": 3}', "[" * 10**5])
def test_a_strangers_lock_is_nobodys(tmp_path: Path, owner: str):
    RunDirectory.open(tmp_path, "a: 1\n").close()
    (tmp_path / "run.lock").write_text(owner)
    assert RunDirectory.attach(tmp_path).read_config() == "a: 1\n"
    RunDirectory.open(tmp_path, "a: 1\n").close()


def test_a_crash_of_a_forced_command_is_undone_by_the_next(tmp_path: Path):
    RunDirectory.open(tmp_path, "a: 1\n").close()
    with pytest.raises(ZeroDivisionError), RunDirectory.open(tmp_path, "a: 2\n", force=True) as run:
        assert run.forced
        raise ZeroDivisionError
    with RunDirectory.open(tmp_path, "a: 1\n") as run:
        assert run.read_config() == "a: 1\n" and not run.forced


def test_what_came_of_a_command_stays(tmp_path: Path):
    with pytest.raises(UserError), RunDirectory.open(tmp_path / "run", "a: 1\n") as run:
        (run.checkpoints / "3").mkdir()
        raise UserError("after a checkpoint")
    assert (tmp_path / "run" / "config.txt").read_text() == "a: 1\n"
    with pytest.raises(KeyboardInterrupt), RunDirectory.open(tmp_path / "other", "a: 1\n"):
        raise KeyboardInterrupt
    assert (tmp_path / "other" / "config.txt").exists(), "to be resumed"


@pytest.mark.slow
def test_a_best_checkpoint_by_a_metric_that_is_logged_less_often_than_saved(tmp_path: Path):
    cfg: Any = tiny_trainer(5, evaluators=()).set(log_every=4, keep_best=KeepBest.Config(metric="loss"))
    cfg.checkpoint.set(save_every=2, keep=1)
    cfg.build().run(tmp_path, progress=False)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [2, 4, 5]
    assert (tmp_path / "checkpoints" / "best" / "5").is_dir()
    # Stopped at an update without a row: it is saved, and not compared.
    stopped = iter([False, False, False, True, True, True])
    cfg.build().run(tmp_path / "stopped", progress=False, stop=lambda: next(stopped))
    assert (tmp_path / "stopped" / "checkpoints" / "3").is_dir()
    assert (tmp_path / "stopped" / "checkpoints" / "best" / "2").is_dir()


@pytest.mark.slow
def test_an_unknown_metric_costs_no_checkpoint(tmp_path: Path):
    cfg: Any = tiny_trainer(2, evaluators=()).set(keep_best=KeepBest.Config(metric="los"))
    with pytest.raises(UserError, match="keep_best.metric='los': .*did you mean 'loss'"):
        cfg.build().run(tmp_path / "run", progress=False)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()] == ["2"]
