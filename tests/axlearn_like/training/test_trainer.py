import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.versions import CheckpointError
from axlearn_like.config import REQUIRED, ConfigBase, ConfigError, Configurable, config_items, set_path
from axlearn_like.input import FirstFit, InputError, SupervisedInput
from axlearn_like.operations.goodput import account
from axlearn_like.operations.profiler import Profiler
from axlearn_like.operations.recompilation import RecompilationError
from axlearn_like.operations.sdc import SDCCheck
from axlearn_like.operations.watchdog import EXIT_CODE
from axlearn_like.run.directory import RunDirectory, RunDirectoryError
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.early_stopping import EarlyStopping
from axlearn_like.training.evaluators import LossEvaluator
from mesh import UserError
from tests.axlearn_like.tiny import ROOT, Counting, run_in_process, tiny_model, tiny_trainer


def losses(run_dir) -> dict[int, float]:
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return {row["step"]: row["loss"] for row in rows}


def events(run_dir) -> list[tuple]:
    """The beginnings and ends of its processes."""
    rows = read_rows(run_dir / "events.jsonl")
    return [(row["event"], row["step"]) for row in rows if row["event"] in ("train_begin", "train_end")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    tiny_trainer(12).build().run(run_dir, progress=False)
    return losses(run_dir)


def spoil(checkpoint: Path) -> None:
    """Turn a bit of its largest array."""
    file = max((checkpoint / "params").glob("**/d/*"), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :])


@pytest.mark.slow
def test_a_run_that_ended_early_is_asked_again(tmp_path):
    """Ask the rule, which reads the rows: the run has ended, or goes on where the rule is another by now."""
    rule = EarlyStopping.Config(metric="loss", at_least=0.0, rows=2)
    cfg = tiny_trainer(9, early_stopping=rule)
    ended = cfg.build().run(tmp_path, progress=False)
    assert ended["finished"] and ended["step"] < 9
    assert cfg.build().run(tmp_path, progress=False) == {**ended, "before": True}
    rule.set(at_least=1e9)
    again = cfg.build().run(tmp_path, progress=False, force=True)
    assert again["step"] == 9 and "before" not in again


@pytest.mark.numerics
def test_it_learns_and_writes_a_run_directory(tmp_path):
    run_dir = tmp_path / "run"
    cfg = tiny_trainer(30)
    last = cfg.build().run(run_dir, progress=False)
    curve = losses(run_dir)
    assert last["step"] == 30 and last["loss"] == curve[30]
    assert curve[1] == pytest.approx(np.log(32), abs=0.5)
    assert curve[30] < curve[1] - 1
    wanted = {
        "phase",
        "step",
        "time",
        "loss",
        "accuracy",
        "grad_norm",
        "lr",
        "tokens",
        "step_seconds",
    }
    assert wanted <= set(last)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["28", "30"]
    assert events(run_dir) == [("train_begin", 0), ("train_end", 30)]
    assert (run_dir / "config.txt").read_text().startswith("axlearn_like.training.trainer:Trainer\n")
    # Once more: nothing is left to do, and nothing changes, times and events included.
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    again = tiny_trainer(30).build().run(run_dir, progress=False)
    assert again == {**last, "before": True}
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    spoil(run_dir / "checkpoints" / "30")
    with pytest.raises(CheckpointError, match="is damaged .*nearest older good step is 28"):
        tiny_trainer(30).build().run(run_dir, progress=False)


@pytest.mark.slow
@pytest.mark.numerics
def test_killed_then_asked_to_leave_then_profiled_it_equals_the_uninterrupted_run(
    tmp_path, uninterrupted, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    saved = run_dir / "checkpoints" / "4"
    killed = run_in_process(run_dir, 12, step=7, signum=signal.SIGKILL, wait_for=saved)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert list(losses(run_dir)) == [1, 2, 3, 4, 5, 6]  # more than the checkpoint holds
    stopped = run_in_process(run_dir, 12, step=8, signum=signal.SIGTERM)
    assert stopped.returncode == 0, stopped.stderr[-3000:]
    assert '"step": 8' in stopped.stdout
    for name, value in {"STEP": "10", "SIGNAL": str(int(signal.SIGUSR1)), "AWAIT": str(run_dir)}.items():
        monkeypatch.setenv(f"TINY_{name}", value)
    tiny_trainer(12).build().run(run_dir, progress=False)
    assert list((run_dir / "profiles" / "step-11").rglob("*.xplane.pb"))
    assert f"profile: {run_dir / 'profiles' / 'step-11'}" in capsys.readouterr().err
    ends = [("train_begin", 0), ("train_begin", 4), ("train_end", 8), ("train_begin", 8), ("train_end", 12)]
    assert events(run_dir) == ends
    assert losses(run_dir) == uninterrupted  # to the bit
    told = read_rows(run_dir / "events.jsonl")
    found = account(told)
    assert found.sessions == 3 and {"step", "compile", "checkpoint", "startup", "down"} <= set(found.seconds)
    began = next(row["began"] for row in told if row["event"] == "train_begin")
    ended = next(row["time"] for row in reversed(told) if row["event"] == "train_end")
    assert found.total == pytest.approx(ended - began, abs=0.1)  # every moment is in it, once


HANGING = """
import sys
from axlearn_like.operations.watchdog import Watchdog
from tests.axlearn_like.tiny import tiny_trainer
cfg = tiny_trainer(12, watchdog=Watchdog.Config(dump_after=4.0, exit_after=0.5))
cfg.build().run(sys.argv[1], progress=False)
"""


@pytest.mark.full  # tests/axlearn_like/operations/test_watchdog.py has the process that hangs
def test_a_run_that_hangs_is_ended_and_says_where(tmp_path):
    run_dir = tmp_path / "run"
    never = {"TINY_STEP": "3", "TINY_SIGNAL": "0", "TINY_AWAIT": str(tmp_path / "never")}
    words = [sys.executable, "-c", HANGING, str(run_dir)]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **never}, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == EXIT_CODE, done.stderr[-3000:]
    assert "after step 3, during evaluation" in (run_dir / "stacks.txt").read_text()
    assert "tiny.py" in (run_dir / "stacks.txt").read_text()


@pytest.mark.full  # the same loop does them in RL: test_no_operation_changes_a_bit
def test_all_operations_at_once_change_no_bit(tmp_path, uninterrupted):
    run_dir = tmp_path / "run"
    held_out = LossEvaluator.Config(input=tiny_trainer(1).input.set(seed=9), batches=1, every=4)
    cfg = tiny_trainer(
        12,
        evaluators=(held_out,),
        keep_best=KeepBest.Config(metric="eval_loss"),
        sdc_check=SDCCheck.Config(every=5),
        profile=Profiler.Config(start_step=9, steps=1),
    )
    last = cfg.build().run(run_dir, progress=False)
    assert losses(run_dir) == uninterrupted
    told = [(row["event"], row["step"]) for row in read_rows(run_dir / "events.jsonl") if "step" in row]
    for event in (("profile", 9), ("saved", 12), ("best", 12)):
        assert event in told
    assert {"time/sdc_check", "time/evaluation", "goodput", "tokens_per_second", "input_seconds"} <= set(last)
    # Another run begins with its parameters.
    start = StartFrom.Config(path=str(run_dir / "checkpoints"))
    after = tiny_trainer(1, start_from=start, seed=4).build().run(tmp_path / "other", progress=False)
    assert after["loss"] < uninterrupted[1] - 0.5
    other_model = tiny_trainer(1, start_from=start, model=tiny_model().set(vocab_size=48))
    with pytest.raises(CheckpointError, match=r"12 is of another model .*'embedding/weight_vd' has shape .*\[32, 16\]"):
        other_model.build().run(tmp_path / "larger", progress=False)
    assert not (tmp_path / "larger").exists()
    # A metric that nobody measures is told at the first evaluation.
    wrong = cfg.clone(keep_best=KeepBest.Config(metric="eval_los"), sdc_check=None)
    with pytest.raises(UserError, match="keep_best.metric='eval_los': .*did you mean 'eval_loss'"):
        wrong.build().run(tmp_path / "wrong", progress=False)


class Growing(SupervisedInput):
    """An input whose batches alternate between two lengths."""

    class Config(SupervisedInput.Config):
        pass

    def __next__(self) -> dict[str, np.ndarray]:
        batch = super().__next__()
        self._count = getattr(self, "_count", 0) + 1
        return batch if self._count < 3 else {name: array[:, :8] for name, array in batch.items()}


def test_a_batch_of_another_shape_is_named(tmp_path):
    cfg = tiny_trainer(5)
    cfg.input = Growing.Config(**dict(config_items(cfg.input)))
    with pytest.raises(RecompilationError, match=r"batch/tokens: shape \(8, 16\) -> \(8, 8\)"):
        cfg.build().run(tmp_path / "run", progress=False)


class Spoiling(Configurable):
    """An evaluator that puts a file in the place of the checkpoints after step 3."""

    class Config(ConfigBase["Spoiling"]):
        folder: str = REQUIRED

    def __init__(self, cfg: Config, *, graphdef, loss):
        self.every, self.averaged, self._folder = 1, False, Path(cfg.folder)

    def run(self, params, step: int) -> dict[str, float]:
        if step == 3:
            while not (self._folder / "2").exists():  # it is being written
                time.sleep(0.01)
            self._folder.rename(self._folder.with_name("moved"))
            self._folder.write_text("in the way")
        return {}


def test_a_save_that_fails_ends_the_run_within_a_step_and_names_the_place(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    spoiling = Spoiling.Config(folder=str(folder))
    cfg = tiny_trainer(12, checkpoint=Checkpointer.Config(save_every=1), evaluators=(spoiling,))
    with pytest.raises(CheckpointError, match=f"could not write a checkpoint to {folder}"):
        cfg.build().run(tmp_path / "run", progress=False)
    assert read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"] in (3, 4)


@pytest.mark.numerics
@pytest.mark.full  # test_step_mesh.py accumulates in every run
def test_accumulation_changes_no_loss(tmp_path, uninterrupted):
    tiny_trainer(12, microbatches=4).build().run(tmp_path / "run", progress=False)
    accumulated = losses(tmp_path / "run")
    np.testing.assert_allclose(list(accumulated.values()), list(uninterrupted.values()), rtol=1e-4)


def test_rows_between_logged_steps_are_not_written(tmp_path):
    tiny_trainer(7, log_every=3, evaluators=()).build().run(tmp_path / "run", progress=False)
    steps = [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert steps == [3, 6, 7]


def test_a_batch_that_does_not_divide_is_refused_before_anything_is_made(tmp_path):
    cfg = tiny_trainer(5, microbatches=3)
    with pytest.raises(ConfigError, match=r"Trainer\.input\.batch_size: expected a multiple of 3: .* got 8"):
        cfg.build().run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "path", ["checkpoint.keep", "profile.steps", "watchdog.dump_after", "loss.chunks", "num_steps"]
)
def test_a_field_of_a_part_is_refused_before_anything_is_made(tmp_path, path):
    cfg = set_path(tiny_trainer(5), path, 0)
    with pytest.raises(ConfigError, match=rf"^Trainer\.{path}: expected .*, got 0") as error:
        cfg.build().run(tmp_path / "run")
    assert error.value.path == f"Trainer.{path}"
    assert not (tmp_path / "run").exists()


def test_another_config_is_refused_and_harms_nothing(tmp_path):
    run_dir = tmp_path / "run"
    tiny_trainer(4).build().run(run_dir, progress=False)
    before = losses(run_dir)
    with pytest.raises(RunDirectoryError, match="-num_steps: 4"):
        tiny_trainer(3).build().run(run_dir, progress=False)
    assert losses(run_dir) == before


def test_an_open_run_directory_is_used_as_it_is(tmp_path):
    with RunDirectory.open(tmp_path / "run", "a larger experiment\n") as run_dir:
        last = tiny_trainer(2).build().run(run_dir, progress=False)
        assert last["step"] == 2
        assert run_dir.config_path.read_text() == "a larger experiment\n"


class Failing(Counting):
    """A source that breaks down at its 60th example."""

    class Config(Counting.Config):
        pass

    def __init__(self, cfg: Counting.Config):
        super().__init__(cfg)
        self._left = 60

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self._left -= 1
        if self._left < 0:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def test_every_step_in_the_last_checkpoint_has_its_row(tmp_path):
    cfg = tiny_trainer(12, checkpoint=Checkpointer.Config(save_every=1))
    cfg.input.set(source=Failing.Config(), rows=FirstFit.Config(window=8))
    with pytest.raises(OSError, match="the disk is gone"):
        cfg.build().run(tmp_path / "run", progress=False)
    saved = max(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert 0 < saved < 12
    assert list(losses(tmp_path / "run")) == list(range(1, saved + 1))


def test_an_example_too_long_is_named(tmp_path):
    cfg = tiny_trainer(5)
    cfg.input.set(source=Counting.Config(max_length=40))
    with pytest.raises(InputError, match=r"example \d+ of Counting has \d+ tokens"):
        cfg.build().run(tmp_path / "run", progress=False)


SHARDED = """
import sys
from axlearn_like.run.metrics import read_rows
from tests.axlearn_like.tiny import tiny_trainer
rules = {"embed": ("data", "fsdp")}
cfg = tiny_trainer(5, mesh={"data": 2, "fsdp": 2, "tensor": 2}, microbatches=2, axis_rules=rules)
cfg.build().run(sys.argv[1], progress=False)
print(*[row["loss"] for row in read_rows(sys.argv[1] + "/metrics.jsonl")])
"""


@pytest.mark.numerics
@pytest.mark.full  # test_step_mesh.py takes a step on eight devices in every run
def test_eight_devices_train_as_one_does(tmp_path, uninterrupted):
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = list(uninterrupted.values())[:5]
    np.testing.assert_allclose(list(map(float, done.stdout.split())), expected, rtol=1e-4)


@pytest.mark.slow
def test_importing_the_trainer_loads_neither_orbax_nor_grain():
    code = "import sys, axlearn_like.training.trainer; print({'orbax', 'grain'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
