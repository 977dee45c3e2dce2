"""All roles in one process: repeatable, and resumed as if it had not been interrupted."""

from pathlib import Path

import pytest

from axlearn_like.config_text import to_text
from axlearn_like.run_directory import RunDirectory
from rl.runtime.inprocess import run_inprocess
from tests.rl.runtime.experiments import assert_same_outcome, events, metrics, parameters, run_here
from tests.rl.tiny import tiny_experiment


def interrupted(path: Path, staleness: int, at: int) -> Path:
    """The run, asked to stop at an update, and resumed."""
    cfg = tiny_experiment(staleness=staleness)
    seen: list[int] = []
    for expected in (at, cfg.num_steps):
        with RunDirectory.open(path, to_text(cfg)) as run:
            goal = expected
            done = run_inprocess(cfg.build(), run, lambda goal=goal: goal in seen and goal == at, seen.append)
            assert done == expected
    assert seen == [1, 2, 3, 4]
    return path


@pytest.mark.parametrize(("staleness", "at"), [(0, 2), (1, 3)])
def test_a_resumed_run_equals_an_uninterrupted_one(staleness: int, at: int, tmp_path: Path) -> None:
    whole = run_here(tmp_path / "whole", tiny_experiment(staleness=staleness))
    assert_same_outcome(interrupted(tmp_path / "parts", staleness, at), whole)


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    one, two = (run_here(tmp_path / str(seed), tiny_experiment(seed=seed)) for seed in (0, 1))
    assert metrics(one) != metrics(two)
    assert parameters(one) != parameters(two)


def test_every_update_is_made_of_rollouts_within_the_staleness_bound(tmp_path: Path) -> None:
    path = run_here(tmp_path, tiny_experiment(staleness=1))
    assert [row["staleness_max"] for row in metrics(path)] == [0, 1, 1, 1]
    assert [row["version"] for row in events(path, "generate")] == [0, 0, 0, 0, 1, 1, 2, 2]
