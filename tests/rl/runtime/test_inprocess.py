"""All roles in one process: the run is repeatable, and a resumed one equals an uninterrupted one."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.checkpoint.reader import list_steps, restore_params
from axlearn_like.config import ConfigError, to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from experiments.modifiers import low_rank
from rl.audit.invariants import check_run
from rl.objective import NegativeReward
from rl.objective.presets import maxrl
from rl.rollout.agent_loops.branching import Branching
from rl.rollout.model_runner.runner import ModelRunner
from rl.runtime.inprocess import run_inprocess
from rl.training.packing import Packing
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from tests.bounds import within
from tests.rl.audit.test_invariants import AGE, ORDER, WAITS, WHOLE
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, metrics, parameters, run_here, run_in_parts
from tests.rl.tiny import ascii_share, tiny_experiment


def test_a_run_stopped_and_resumed_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    cfg = tiny_experiment(staleness=1)
    parts = run_in_parts(tmp_path / "parts", cfg, stop_after=3)
    assert_same_outcome(parts, run_here(tmp_path / "whole", cfg))


ANSWERS, BREAKS = [0], [False]  # answers scored, and if the reward function is wrong from the second update on


def reward_that_breaks(problem_id: int, answer: str) -> float:
    ANSWERS[0] += 1
    return -0.5 if BREAKS[0] and ANSWERS[0] > 16 + 5 else ascii_share(problem_id, answer)


@pytest.mark.full
def test_a_negative_reward_for_maxrl_ends_the_run_saved_and_a_mended_function_goes_on(tmp_path: Path) -> None:
    verifier = InlineVerifier.Config(scorer=FunctionScorer.Config(function=reward_that_breaks))
    cfg = tiny_experiment(objective=maxrl(), verifier=verifier, evaluation=None)
    assert cfg.trainer.checkpoint.save_every == 2
    ANSWERS[0], BREAKS[0] = 0, True
    with pytest.raises(NegativeReward, match=r"sample 1: .*-0\.5.*run the same command again"):
        run_here(tmp_path / "parts", cfg)
    assert list_steps(tmp_path / "parts" / "checkpoints" / "rl") == [1]
    BREAKS[0] = False
    run_here(tmp_path / "parts", cfg)
    assert_same_outcome(tmp_path / "parts", run_here(tmp_path / "whole", cfg))


@pytest.mark.numerics
@pytest.mark.full
def test_samples_that_branch_are_trained_on_as_trees_and_a_stopped_run_equals_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    cfg = tiny_experiment(samples_per_prompt=8, branching=Branching.Config(at=(2, 4)), staleness=1)
    cfg.trainer.packing = Packing.Config(lengths=(24, 48), rows=2, tree=True)
    cfg.check()
    whole = run_here(tmp_path / "whole", cfg)
    assert_same_outcome(run_in_parts(tmp_path / "parts", cfg, stop_after=2), whole)
    rows = metrics(whole)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:  # of 8 x 6 tokens at most 2 x 2 + 4 x 2 + 8 x 2 are distinct
        assert row["shared_tokens"] >= 1 - 28 / 48 - 1e-6
        assert within(row["logprob_diff_max"], 4e-6)


@pytest.mark.full
def test_rl_of_adapters_publishes_and_saves_adapters_alone(tmp_path: Path) -> None:
    """Check it of versions before the current one too, and that a resumed run equals an uninterrupted one."""
    cfg = tiny_experiment(staleness=1)
    low_rank(cfg)
    cfg.trainer.checkpoint.set(save_every=1)
    whole = run_here(tmp_path / "whole", cfg)
    assert_same_outcome(run_in_parts(tmp_path / "parts", cfg, stop_after=3), whole)
    params = parameters(whole)
    adapters = sum(len(array) for name, array in params.items() if "lora" in name)
    everything = sum(map(len, params.values()))
    assert 0 < adapters < everything / 3  # of so small a model
    pushes = {row["version"]: row["nbytes"] for row in events(whole, "push")}
    assert pushes == {0: everything} | dict.fromkeys((1, 2, 3, 4), adapters)
    resumed = [row["nbytes"] for row in events(tmp_path / "parts", "push") if row["version"] == 3]
    assert resumed == [adapters, adapters], "the version before it has the base"
    *others, step = [whole / "checkpoints" / "rl" / str(step) for step in list_steps(whole / "checkpoints" / "rl")]
    assert others and {file.stat().st_nlink for file in (step / "frozen" / "d").iterdir()} == {1 + len(others)}
    kept = json.loads((step / "manifest" / "metadata").read_text())
    recent = {name for name in kept["rest"] if name.startswith("recent/")}
    assert all("lora" in name for name in (*kept["params"], *recent)) and recent
    assert len(kept["params"]) + len(kept["frozen"]) == len(params)


def test_every_update_is_made_of_rollouts_within_the_staleness_bound(tmp_path: Path) -> None:
    path = run_here(tmp_path, tiny_experiment(staleness=1))
    assert [row["staleness_max"] for row in metrics(path)] == [0, 1, 1, 1]
    assert [row["version"] for row in events(path, "generate")] == [0, 0, 0, 0, 1, 1, 2, 2]
    findings = check_run(path)
    assert [finding.broken for finding in findings] == [()] * len(findings)
    assert all(findings[i].checked for i in (ORDER, WHOLE, AGE, WAITS))
    sampled = read_rows(path / "rollouts" / "rl.jsonl")
    assert [(row["phase"], row["step"], row["version"]) for row in sampled[:2]] == [("rl", 1, 0)] * 2
    assert all(row["question"] and 0 <= row["reward"] <= 1 for row in sampled)


@pytest.mark.slow
def test_evaluations_during_training_change_no_bit_of_it_and_equal_those_of_shorter_runs(tmp_path: Path) -> None:
    """The last evaluation of a run of two updates is that of version 2 of a longer one."""
    whole = run_here(tmp_path / "whole", tiny_experiment(evaluate_every=2))
    assert_same_outcome(whole, run_here(tmp_path / "plain", tiny_experiment()))
    short = run_here(tmp_path / "short", tiny_experiment(num_steps=2))
    rows = read_rows(whole / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert rows[1] == json.loads((short / "eval_after.json").read_text())
    assert rows[2] == json.loads((whole / "eval_after.json").read_text())
    shown = [read_rows(whole / "rollouts" / f"eval_{when}.jsonl") for when in ("before", "after")]
    assert [row["answer"] for row in shown[0]] != [row["answer"] for row in shown[1]]


@pytest.mark.full  # tests/axlearn_like/checkpoint/test_tiers.py has metrics that come later
def test_the_best_checkpoints_by_evaluation_are_kept_also_by_a_run_that_is_resumed(tmp_path: Path) -> None:
    """One newest checkpoint is kept, and an evaluation of a version ends updates after it was saved."""
    cfg = tiny_experiment(evaluate_every=2)
    cfg.trainer.set(keep_best=KeepBest.Config(metric="evaluation/pass@4", order="highest"))
    cfg.trainer.checkpoint.set(save_every=1, keep=1)
    whole = run_here(tmp_path / "whole", cfg)
    values = {row["step"]: row["pass@4"] for row in read_rows(whole / "evaluations.jsonl") if row["step"]}
    assert sorted(values) == [2, 4]
    best = max(values, key=lambda step: (values[step], -step))
    folder = whole / "checkpoints" / "rl" / "best"
    assert json.loads((folder / "best.json").read_text())["steps"] == {str(best): values[best]}
    assert list((folder / "pending").iterdir()) == []
    seen: list[int] = []
    with RunDirectory.open(tmp_path / "parts", to_text(cfg)) as run:
        assert run_inprocess(cfg.build(), run, lambda: 2 in seen, seen.append) == 2  # saved, not evaluated
    assert (tmp_path / "parts" / "checkpoints" / "rl" / "best" / "pending" / "2").is_dir()
    with RunDirectory.open(tmp_path / "parts", to_text(cfg)) as run:
        run_inprocess(cfg.build(), run, lambda: False, seen.append)
    assert_same_outcome(tmp_path / "parts", whole)
    resumed = tmp_path / "parts" / "checkpoints" / "rl" / "best"
    assert (resumed / "best.json").read_text() == (folder / "best.json").read_text()
    for one, other in zip(
        *(map(np.asarray, jax.tree.leaves(restore_params(p))) for p in (folder, resumed)), strict=True
    ):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate_every": None}, r"keep_best\.metric: expected no evaluation/\.\.\. without evaluate_every"),
        ({"evaluate_every": 3}, r"checkpoint\.save_every: expected a divisor of evaluate_every=3"),
    ],
)
def test_the_best_by_evaluations_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    cfg = tiny_experiment(**changes)
    cfg.trainer.set(keep_best=KeepBest.Config(metric="evaluation/pass@1", order="highest"))
    with pytest.raises(ConfigError, match=message):
        cfg.check("inprocess")


def test_the_engine_has_no_memory_while_the_trainer_updates(tmp_path: Path) -> None:
    """Each update is two leases, then the trainer's turn."""
    cfg, holds = tiny_experiment(num_steps=2, evaluation=None), list[tuple[int, bool]]()
    build, runners = ModelRunner.__init__, list[ModelRunner]()

    def built(self: ModelRunner, *args: Any, **more: Any) -> None:
        runners.append(self)
        build(self, *args, **more)

    def on_step(step: int) -> None:
        holds.extend((step, one.cache.pool is not None or one.params is not None) for one in runners)

    # Not by `monkeypatch`, before and after which programs are forgotten: this function is not traced.
    with mock.patch.object(ModelRunner, "__init__", built), RunDirectory.open(tmp_path, to_text(cfg)) as run:
        run_inprocess(cfg.build(), run, lambda: False, on_step)
    assert holds[:6] == [(0, True), (0, True), (1, False), (1, True), (1, True), (2, False)]
