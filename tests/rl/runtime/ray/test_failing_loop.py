"""A loop raises an error that is not a UserError: once, it may be the machine's fault; twice, it is a bug."""

from pathlib import Path

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from rl.audit.invariants import check_run
from rl.experiment import RLExperiment
from rl.runtime.ray.runtime import run_ray
from rl.verification.scorers import FunctionScorer
from tests.rl.runtime.ray.experiments import (
    FailingLearner,
    FailingVerifier,
    assert_same_outcome,
    events,
    run_here,
    slow,
)
from tests.rl.tiny import ascii_share, tiny_experiment

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]


def run_with(failures: int, cfg: RLExperiment.Config, path: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Return the message about a loop that fails `failures` times; None if the run ended, as two failures must."""
    left = path.with_name("failures")
    left.write_bytes(b"x" * failures)
    monkeypatch.setenv("AXL_TEST_FAILS", str(left))
    said: list[str] = []
    with RunDirectory.open(path, to_text(cfg)) as run:
        if failures == 2:
            with pytest.raises(RuntimeError, match="a passing fault"):
                run_ray(cfg.build(), run, lambda: False, lambda step: None, said.append)
            return None
        assert run_ray(cfg.build(), run, lambda: False, lambda step: None, said.append) == 2
    [line] = [line for line in said if not line.startswith("waiting ")]
    return line


@pytest.mark.parametrize("failures", [1, 2])
def test_a_worker_whose_loop_fails_is_started_again_unless_it_fails_twice_for_the_same_reason(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test has a Ray session of its own, because actors inherit the environment of the session."""
    path = tmp_path / "run"
    cfg = slow(num_steps=2, workers=1)
    cfg.verifier = FailingVerifier.Config(scorer=FunctionScorer.Config(function=ascii_share))
    if (line := run_with(failures, cfg, path, monkeypatch)) is None:
        return
    assert line == "worker-0 failed at update 0; restarting it. RuntimeError('a passing fault')"
    assert_same_outcome(path, run_here(tmp_path / "expected", tiny_experiment(num_steps=2, evaluation=None)))
    assert [len(events(path, "start", role)) for role in ("worker-0", "verifier")] == [2, 1]


@pytest.mark.parametrize("failures", [1, 2])
def test_one_process_of_the_trainer_fails_and_all_are_started_again(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, in the second of two processes."""
    path = tmp_path / "run"
    cfg = slow(num_steps=2, workers=1)
    cfg.trainer.set(processes=2, mesh={"fsdp": 2})
    sound = cfg.learner
    cfg.learner = FailingLearner.Config(optimizer=sound.optimizer, schedule=sound.schedule, clip_norm=sound.clip_norm)
    if (line := run_with(failures, cfg, path, monkeypatch)) is None:
        return
    assert line.startswith("trainer-1 failed at update 0; restarting all trainer processes. RuntimeError(")
    assert [(row["target"], row["cause"]) for row in events(path, "ended")] == [("trainer", "trainer-1")]
    assert [line for finding in check_run(path) for line in finding.broken] == []
