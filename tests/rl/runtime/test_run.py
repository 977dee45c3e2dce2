"""A run from the command line that is stopped in each of the ways a user or a machine can stop it, and resumed."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.run.jsonl import JsonlTail
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.early_stopping import EarlyStopping
from mesh import UserError
from rl.runtime.run import RLRun
from tests.rl.runtime.ray.command import ROOT, Command
from tests.rl.runtime.ray.experiments import assert_same_outcome, evaluated, parameters, run_here, warmed
from tests.rl.tiny import tiny_experiment

pytestmark = pytest.mark.timeout(900)  # processes that start processes: a busy machine takes long


def finish(path: Path, experiment: str, *arguments: str) -> str:
    """The same command again, to its end; what it printed."""
    with Command(path, experiment, *arguments) as command:
        assert command.wait() == 0, command.output()
        assert command.left() == []
        return command.output()


OURS = (
    r"waiting \d+ s for .+",  # on a busy machine
    r"run directory: .+",
    r"reinforcement learning: 12 updates of 16 rollouts; starting Ray and the roles",
    r"rl: step \d+ of 12, reward \d\.\d+(, [\d,]+ s left)?",
    r"answer of update \d+, reward \d\.\d\d: .*",
    r"killed worker-0 \(pid \d+\) at update \d+; replaced after \d+\.\d s",
)


def assert_only_our_words(lines: list[str]) -> None:
    """No word of Ray's, JAX's or the kernel's; one about the worker that was killed."""
    assert [line for line in lines if not any(re.fullmatch(ours, line) for ours in OURS)] == []
    assert sum(line.startswith("killed") for line in lines) == 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of the experiment `slow`."""
    return run_here(tmp_path_factory.mktemp("whole"), tiny_experiment(num_steps=12, evaluation=None))


@pytest.mark.parametrize(
    ("stop", "reason", "runtime"),
    [
        # In every run tests/chaos ends its run by SIGTERM, and sends it to roles.
        pytest.param(Command.interrupt, "SIGINT", "inprocess", marks=pytest.mark.full),
        pytest.param(Command.interrupt, "SIGINT", "ray", marks=pytest.mark.full),
        pytest.param(lambda command: command.send(signal.SIGTERM), "SIGTERM", "ray", marks=pytest.mark.full),
    ],
)
def test_a_signal_in_the_rl_phase_stops_cleanly_and_the_command_resumes(
    stop: Callable[[Command], None], reason: str, runtime: str, tmp_path: Path, whole: Path
) -> None:
    path, arguments = tmp_path / "run", ("slow", "--set", "workers=1", "--kill-worker-after", "0.25")
    with Command(path, *arguments) as command:
        command.wait_for_updates(5)
        stop(command)
        assert command.wait(60) == 0
        *before, stopped = command.output().splitlines()
        assert command.left() == []
    before.remove("stopping after the current update (Ctrl-C again: at once)")  # progress may be told behind it
    assert_only_our_words(before)
    assert stopped == f"stopped by {reason}; the same command resumes the run: {path}"
    assert 5 <= len(read_rows(path / "metrics.jsonl")) < 12
    if runtime == "inprocess":
        arguments = arguments[:-2]  # the worker was killed once, which a resumed run does not repeat
    output = finish(path, *arguments, "--runtime", runtime)
    assert_same_outcome(path, whole)
    assert output.endswith(f"\nreport: {path / 'report.html'}\n")


@pytest.mark.full
def test_a_second_ctrl_c_ends_at_once_and_the_same_command_resumes(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "run"
    with Command(path, "slow") as command:
        command.wait_for_updates(3)
        command.interrupt()
        command.interrupt()
        assert command.wait(60) in (0, 130)
        assert command.left() == []
    finish(path, "slow")
    assert_same_outcome(path, whole)


@pytest.mark.full
def test_the_command_killed_in_the_rl_phase_leaves_nothing_behind_and_is_resumed(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "run"
    with Command(path, "slow") as command:
        command.wait_for_updates(3)
        command.send(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
        finish(path, "slow")
        assert command.left() == []
    assert_same_outcome(path, whole)


@pytest.mark.full
def test_ctrl_c_in_the_warm_start_is_resumed_to_the_same_policy(tmp_path: Path) -> None:
    path, expected = tmp_path / "run", tmp_path / "expected"
    with Command(path, "warmed", "--runtime", "inprocess") as command:
        command.wait_for_updates(5, phase="sft")
        command.interrupt()
        assert command.wait(60) == 0
        assert command.output().endswith(f"stopped by SIGINT; the same command resumes the run: {path}\n")
        assert command.left() == []
    stopped_at = max(int(folder.name) for folder in (path / "warm_start" / "checkpoints").iterdir())
    assert 5 <= stopped_at < 200
    assert not (path / "metrics.jsonl").exists()
    said: list[str] = []
    for folder in (path, expected):
        assert RLRun(warmed().build(), say=said.append).run(folder, runtime="inprocess") is not None
    assert_same_outcome(path, expected)
    assert parameters(path)


def test_roles_do_all_work_on_devices_and_the_driver_opens_none(tmp_path: Path) -> None:
    """The command ends with an error if anything in its own process opens a device (see `forbid_devices`).

    So it holds no weights: its memory is that of its imports, 170 MB beside libraries.

    Early stopping in the trainer's process ends what the others do.
    """
    with Command(tmp_path / "run", "stopped_early", "--set", "workers=1") as command:
        assert command.wait() == 0, command.output()
        assert 50e6 < command.peak_memory <= 250e6
    run_here(tmp_path / "expected", evaluated())
    assert_same_outcome(tmp_path / "run", tmp_path / "expected")
    for name in ("eval_before.json", "eval_after.json", "rollouts/eval_before.jsonl", "rollouts/eval_after.jsonl"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "expected" / name).read_text()
    supervised = [
        [row["loss"] for row in read_rows(tmp_path / name / "warm_start" / "metrics.jsonl")]
        for name in ("run", "expected")
    ]
    assert supervised[0] == supervised[1] and len(supervised[0]) == 4
    assert {row["role"] for row in read_rows(tmp_path / "run" / "events.jsonl") if row["event"] == "evaluate"} == {
        "worker-0"
    }
    phases = [row["phase"] for row in read_rows(tmp_path / "run" / "events.jsonl") if row["event"] == "phase"]
    assert phases[0] == "sft" and phases[-1] == "eval_after"  # those between may be shorter than a look at them


DRIVER = """
import sys
from rl.runtime.run import RLRun
from tools.fleet import load_placed

RLRun(load_placed("demo", (), None, (), None).cfg.build()).check("ray")
import rl.runtime.ray.runtime

print(*sys.modules)
"""


@pytest.mark.slow
def test_the_driver_imports_no_library_that_only_roles_need() -> None:
    """Before it starts Ray it has imported jax and flax for configs, Ray, and the library of the tasks."""
    command = [sys.executable, "-c", DRIVER]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    imported = set(done.stdout.split())
    assert {"jax", "flax", "ray"} <= imported
    assert not imported & {"tensorstore", "orbax", "grain", "transformers", "tokenizers", "safetensors", "qwix"}
    assert not imported & {"torch", "pandas", "matplotlib", "jax.experimental.pallas"}


def test_phases_that_are_done_are_not_repeated(tmp_path: Path) -> None:
    said: list[str] = []
    run = RLRun(tiny_experiment(num_steps=2).build(), say=said.append)
    first = run.run(tmp_path, runtime="inprocess")
    assert first is not None and first == json.loads((tmp_path / "report.json").read_text())
    assert [re.split("[:,]", line)[0] for line in said] == [
        "run directory",
        "evaluation before RL",
        "reinforcement learning",
        "answer of update 1",
        "evaluation after RL",
    ]
    said.clear()
    log = JsonlTail(tmp_path / "events.jsonl", from_end=True)
    again = run.run(tmp_path, runtime="inprocess")
    finished = "finished before, at update 2: nothing is done again"
    assert said == [f"run directory: {tmp_path}", finished] and log.new_rows() == []
    assert again == first


@pytest.mark.full
def test_a_run_extended_by_force_is_evaluated_after_its_last_update(tmp_path: Path) -> None:
    said: list[str] = []
    first = RLRun(tiny_experiment(num_steps=2).build(), say=said.append).run(tmp_path, runtime="inprocess")
    longer = RLRun(tiny_experiment(num_steps=5).build(), say=said.append)
    second = longer.run(tmp_path, runtime="inprocess", force=True)
    assert first is not None and second is not None
    assert (first["after"]["step"], second["after"]["step"]) == (2, 5)
    assert second["before"] == first["before"] and first["before"]["step"] == 0
    assert second["after"] == _evaluated_without_interruption(tmp_path.with_name("whole"), num_steps=5)
    rows = read_rows(tmp_path / "rollouts" / "eval_after.jsonl")
    assert {row["step"] for row in rows} == {row["version"] for row in rows} == {5}
    # Fewer updates than were done: the checkpoint, and so the evaluation, is still that of step 5.
    shorter = RLRun(tiny_experiment(num_steps=3).build(), say=said.append)
    third = shorter.run(tmp_path, runtime="inprocess", force=True)
    assert third is not None and third["after"] == second["after"]
    assert sum(line.startswith("evaluation after RL") for line in said) == 2


def _evaluated_without_interruption(path: Path, num_steps: int) -> dict[str, Any]:
    report = RLRun(tiny_experiment(num_steps=num_steps).build(), say=lambda line: None).run(path, runtime="inprocess")
    assert report is not None
    return report["after"]


@pytest.mark.slow
def test_early_stopping_ends_a_run_as_if_it_had_been_shorter(tmp_path: Path) -> None:
    """The last evaluation and the best checkpoint by it are the same; a higher bar continues the run."""
    said: list[str] = []
    rule = EarlyStopping.Config(metric="completion_length", at_least=1.0, rows=2)
    cfg = tiny_experiment(num_steps=6, evaluate_every=2, staleness=1)
    cfg.trainer.set(early_stopping=rule, keep_best=KeepBest.Config(metric="evaluation/pass@1", order="highest"))
    cfg.trainer.checkpoint.set(save_every=1)
    run = RLRun(cfg.build(), say=said.append)
    report = run.run(tmp_path / "early", runtime="inprocess")
    assert report is not None and report["after"]["step"] == 3  # the first step with two rows before it
    assert "early stopping: update 3 is the last, by trainer.early_stopping" in said
    shorter = cfg.clone(num_steps=3)
    shorter.trainer.set(early_stopping=None)
    expected = run_here(tmp_path / "short", shorter)
    assert parameters(tmp_path / "early") == parameters(expected)
    assert read_rows(tmp_path / "early" / "evaluations.jsonl") == read_rows(expected / "evaluations.jsonl")
    best = "checkpoints/rl/best/best.json"
    assert (tmp_path / "early" / best).read_text() == (expected / best).read_text()
    said.clear()
    assert run.run(tmp_path / "early", runtime="inprocess") == report
    assert said[1:] == ["finished before, at update 3: nothing is done again"]
    higher = cfg.clone(num_steps=5)
    higher.trainer.set(early_stopping=rule.clone(at_least=100.0))
    on = RLRun(higher.build(), say=said.append).run(tmp_path / "early", runtime="inprocess", force=True)
    assert on is not None and on["after"]["step"] == 5


def test_early_stopping_by_a_metric_that_does_not_exist_says_so(tmp_path: Path) -> None:
    cfg = tiny_experiment(evaluation=None)
    cfg.trainer.set(early_stopping=EarlyStopping.Config(metric="rewards", at_least=1.0))
    with pytest.raises(UserError, match=r"early_stopping\.metric='rewards' is in no row of metrics.jsonl.*reward"):
        RLRun(cfg.build(), say=lambda line: None).run(tmp_path, runtime="inprocess")


def test_a_fault_is_not_injected_where_there_is_no_process_to_kill(tmp_path: Path) -> None:
    run = RLRun(tiny_experiment().build(), say=lambda line: None)
    with pytest.raises(UserError, match=r"kill_worker_after=1\.5; expected a share of the updates"):
        run.run(tmp_path / "run", kill_worker_after=1.5)
    with pytest.raises(UserError, match="kill_worker_after needs a worker in a process of its own"):
        run.run(tmp_path / "run", runtime="inprocess", kill_worker_after=0.5)
    assert not (tmp_path / "run").exists()
