"""Every operation of supervised training, through the policy trainer, and none of them changes a bit of the run."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.config import ConfigBase, Configurable, to_text
from axlearn_like.input import SupervisedInput
from axlearn_like.operations.goodput import account
from axlearn_like.operations.recompilation import RecompilationError
from axlearn_like.operations.sdc import CorruptionError, SDCCheck
from axlearn_like.operations.step_metrics import without_clock
from axlearn_like.operations.utilisation import row_flops
from axlearn_like.operations.watchdog import Watchdog
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.evaluators import LossEvaluator
from rl.experiment import RLExperiment
from rl.runtime.inprocess import run_inprocess
from tests.axlearn_like.tiny import Counting
from tests.rl.tiny import tiny_experiment, tiny_policy
from tests.rl.training.test_trainer import Roles, hand_made

pytestmark = pytest.mark.slow

STEPS = 4
PEAK = 1e9  # FLOP/s of this device, so that there is an MFU


class Copies(Configurable):
    """A writer of one's own: the rows in another file."""

    class Config(ConfigBase["Copies"]):
        pass

    def __init__(self, cfg: Config, *, run_dir: Path, resume_step: int):
        del cfg
        self._file = open(run_dir / f"copies-{resume_step}.jsonl", "a")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(dict(row)) + "\n")

    def close(self) -> None:
        self._file.close()


def operated() -> RLExperiment.Config:
    """The tiny experiment with all operations at once."""
    cfg = tiny_experiment(num_steps=STEPS, evaluation=None)
    held_out = SupervisedInput.Config(source=Counting.Config(), seq_len=16, batch_size=2)
    cfg.trainer.set(
        evaluators=(LossEvaluator.Config(input=held_out, batches=1, every=2),),
        keep_best=KeepBest.Config(metric="reward", order="highest"),
        sdc_check=SDCCheck.Config(every=3),
        writers=(Copies.Config(),),
        watchdog=Watchdog.Config(),
        peak_flops=PEAK,
    )
    return cfg


def run_in(path: Path, cfg: RLExperiment.Config, on_step: Any = lambda step: None) -> int:
    with RunDirectory.open(path, to_text(cfg)) as run:
        return run_inprocess(cfg.build(), run, lambda: False, on_step)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(path / "metrics.jsonl") if row["phase"] == "rl"]


def events(path: Path, *names: str) -> list[tuple[str, int]]:
    return [(row["event"], row["step"]) for row in read_rows(path / "events.jsonl") if row["event"] in names]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all operations; SIGUSR1 comes after the first update."""
    folder = tmp_path_factory.mktemp("operations")

    def on_step(step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    assert run_in(folder / "run", operated(), on_step) == STEPS
    return folder


def test_no_operation_changes_a_bit(whole: Path, tmp_path: Path):
    plain = tiny_experiment(num_steps=STEPS, evaluation=None)
    plain.trainer.set(watchdog=None)
    assert run_in(tmp_path / "plain", plain) == STEPS
    measured = [{k: v for k, v in row.items() if not k.startswith("eval_")} for row in rows_of(whole / "run")]
    assert list(map(without_clock, measured)) == list(map(without_clock, rows_of(tmp_path / "plain")))
    ours, theirs = (restore_params(path / "checkpoints" / "rl") for path in (whole / "run", tmp_path / "plain"))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))


@pytest.mark.numerics
def test_goodput_accounts_for_the_whole_session(whole: Path):
    told = read_rows(whole / "run" / "events.jsonl")
    assert events(whole / "run", "train_begin", "train_end") == [("train_begin", 0), ("train_end", STEPS)]
    found = account(told)
    assert found.sessions == 1 and {"step", "input", "compile", "checkpoint", "evaluation", "sdc_check"} <= set(
        found.seconds
    )
    began = next(row["began"] for row in told if row["event"] == "train_begin")
    ended = next(row["time"] for row in told if row["event"] == "train_end")
    assert found.total == pytest.approx(ended - began, abs=0.1)


def test_goodput_is_in_the_report(whole: Path):
    from tools.report import load_run
    from tools.report.table import goodput_text

    assert goodput_text(load_run(whole / "run")).startswith("goodput ")


@pytest.mark.numerics
def test_a_row_has_speed_utilisation_and_memory(whole: Path):
    row = rows_of(whole / "run")[-1]
    assert row["tokens_per_second"] == pytest.approx(row["train_tokens"] / row["step_seconds"], rel=1e-3)
    each = row_flops(tiny_policy(), 11, 4, 6)  # of a prompt with its four samples
    assert each is not None
    flops = row["live_rollouts"] / 4 * each
    assert row["mfu"] == pytest.approx(flops / row["step_seconds"] / PEAK, rel=0.01, abs=1e-4)
    assert row["host_memory_bytes"] > 50e6 and 0 < row["goodput"] < 1 and row["input_seconds"] >= row["wait_seconds"]


def test_sigusr1_records_a_profile(whole: Path):
    assert list((whole / "run" / "profiles" / "step-2").rglob("*.xplane.pb"))
    assert events(whole / "run", "profile") == [("profile", 2)]


@pytest.mark.numerics
def test_evaluators_measure_the_policy(whole: Path):
    found = {row["step"]: row["eval_loss"] for row in rows_of(whole / "run") if "eval_loss" in row}
    assert list(found) == [2, 4] and found[2] != found[4]
    assert found[2] == pytest.approx(np.log(272), rel=0.1)


def test_the_best_checkpoint_by_reward_is_kept(whole: Path):
    folder = whole / "run" / "checkpoints" / "rl" / "best"
    rewards = {row["step"]: row["reward"] for row in rows_of(whole / "run") if row["step"] in (2, 4)}
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert json.loads((folder / "best.json").read_text())["steps"] == {str(best): rewards[best]}
    restore_params(folder)


def test_writers_get_every_row(whole: Path):
    assert read_rows(whole / "run" / "copies-0.jsonl") == rows_of(whole / "run")


def test_a_wrong_bit_is_found_and_nothing_is_saved(tmp_path: Path):
    """The step of the loop is replaced by one whose second result of a check has another bit."""
    cfg = tiny_experiment(evaluation=None)
    cfg.trainer.set(sdc_check=SDCCheck.Config(every=1))
    roles = Roles.make(tmp_path / "r", cfg)
    sound, calls = roles.trainer._loop.step_fn, [0]

    def faulty(state: Any, batch: Any) -> Any:
        new, metrics = sound(state, batch)
        calls[0] += 1
        return new, {**metrics, "loss": metrics["loss"] + 1} if calls[0] == 2 else metrics

    roles.trainer._loop.step_fn = faulty
    roles.submit(rewards=[1.0, 0.0, 0.0, 0.5], lengths=[2, 2, 2, 2])
    with pytest.raises(CorruptionError, match="step 1, computed twice .*gave different bits in\n  metrics/loss"):
        roles.trainer.run_once()
    assert roles.trainer.step == 0 and roles.controller.status()["consumed_steps"] == 0


def submit_live(roles: Roles, live: int) -> None:
    """A batch in which so many of the four groups have a gradient."""
    roles.trainer.settle()  # the next batch is leased when the version of the last update is there
    number = 0
    while (lease := roles.controller.lease("hand")) is not None and lease.step == roles.trainer.step:
        groups = []
        for prompt in lease.prompts:
            one = hand_made(lease, [1.0, 0.0, 0.0, 0.5] if number < live else [0.5] * 4, [2, 2, 2, 2])
            groups += [group for group in one if group.prompt is prompt]
            number += 1
        assert roles.controller.submit(lease.id, tuple(groups))


def test_the_step_is_compiled_for_the_rows_that_batches_can_have_and_no_more(tmp_path: Path):
    cfg = tiny_experiment(evaluation=None)
    cfg.trainer.set(row_multiple=2)
    roles = Roles.make(tmp_path / "r", cfg)
    for live in (4, 1, 3):
        submit_live(roles, live)
        assert roles.trainer.run_once()
    assert roles.trainer._loop.step_fn.step.compiled == 2
    compiled = [row for row in read_rows(roles.run.events_path) if row["event"] == "compile"]
    assert len(compiled) == 2 and compiled[0]["arguments"] > 0
    cfg.trainer.set(max_compilations=1)
    strict = Roles.make(tmp_path / "strict", cfg)
    submit_live(strict, 4)
    assert strict.trainer.run_once()
    submit_live(strict, 1)
    with pytest.raises(RecompilationError, match=r"(?s)max_compilations=1.*batch/action_mask: shape \(4, .*\(2, "):
        strict.trainer.run_once()


def test_the_watchdog_notices_a_batch_that_does_not_come(tmp_path: Path):
    cfg = tiny_experiment(evaluation=None)
    cfg.trainer.set(watchdog=Watchdog.Config(dump_after=0.5))
    roles = Roles.make(tmp_path / "r", cfg)
    deadline = time.monotonic() + 60

    def dumps() -> list[dict[str, Any]]:
        rows = [row for row in read_rows(roles.run.events_path) if row["event"] == "watchdog"]
        return [row for row in rows if (row["what"], row["during"]) == ("stacks", "input")]

    while not (found := dumps()):
        roles.trainer._loop.beat(0)  # a busy machine may have been silent for longer before
        assert not roles.trainer.run_once(timeout=2.0)  # much longer than the look at the events
        assert time.monotonic() < deadline
    assert found[0]["step"] == 0
    assert "run_once" in (tmp_path / "r" / "stacks.txt").read_text()
    roles.trainer._session.close()
