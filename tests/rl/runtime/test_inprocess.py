"""All roles in one process: the run is repeatable, and a resumed one equals an uninterrupted one."""

from pathlib import Path

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from rl.runtime.inprocess import run_inprocess
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, metrics, run_here
from tests.rl.tiny import tiny_experiment


def test_a_run_stopped_and_resumed_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    cfg = tiny_experiment(staleness=1)
    seen: list[int] = []
    for last, stop in ((3, lambda: 3 in seen), (4, lambda: False)):
        with RunDirectory.open(tmp_path / "parts", to_text(cfg)) as run:
            assert run_inprocess(cfg.build(), run, stop, seen.append) == last
    assert seen == [1, 2, 3, 4]
    assert_same_outcome(tmp_path / "parts", run_here(tmp_path / "whole", cfg))


def test_every_update_is_made_of_rollouts_within_the_staleness_bound(tmp_path: Path) -> None:
    path = run_here(tmp_path, tiny_experiment(staleness=1))
    assert [row["staleness_max"] for row in metrics(path)] == [0, 1, 1, 1]
    assert [row["version"] for row in events(path, "generate")] == [0, 0, 0, 0, 1, 1, 2, 2]
