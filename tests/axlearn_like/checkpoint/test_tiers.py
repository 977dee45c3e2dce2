import json

import numpy as np
import pytest

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.checkpoint.tiers import CheckpointTiers
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from mesh import UserError
from tests.axlearn_like.checkpoint.test_checkpointer import assert_equal, make_state


def tiers(run_dir, *, best=None):
    directory, events = run_dir / "checkpoints", EventLog(run_dir / "events.jsonl")
    run_dir.mkdir(exist_ok=True)
    local = Checkpointer.Config(save_every=1, keep=2).build(directory=directory)
    kept = KeepBest.Config(metric="eval_loss", **best).build(directory=directory) if best is not None else None
    return CheckpointTiers(local, kept, events)


def events(run_dir, name):
    return [row["step"] for row in read_rows(run_dir / "events.jsonl") if row["event"] == name]


def save(one, steps, values=None):
    for step in steps:
        one.save(step, make_state(step), {"n": step}, None if values is None else {"eval_loss": values[step]})


@pytest.mark.slow
def test_the_best_are_kept_besides_the_newest(tmp_path):
    run = tmp_path / "run"
    one = tiers(run, best={"keep": 2})
    values = {1: 0.9, 2: 0.3, 3: 0.5, 4: 0.3, 5: 0.8, 6: float("nan")}
    save(one, values, values)
    one.close()
    best = run / "checkpoints" / "best"
    assert sorted(p.name for p in best.iterdir()) == ["2", "4", "best.json"]
    assert json.loads((best / "best.json").read_text()) == {
        "metric": "eval_loss",
        "order": "lowest",
        "steps": {"2": 0.3, "4": 0.3},
    }
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["5", "6", "best"]
    assert_equal(restore_params(best), {k: np.asarray(v) if k == "head" else {"w": np.asarray(v["w"])}
                                        for k, v in make_state(2)["params"].items()})  # fmt: skip
    # A later process knows them.
    one = tiers(run, best={"keep": 2})
    assert one.latest_step() == 6
    save(one, [7, 8], {7: 0.4, 8: 0.1})
    one.close()
    assert sorted(p.name for p in best.iterdir()) == ["2", "8", "best.json"]
    assert events(run, "best") == [1, 2, 3, 4, 8]


@pytest.mark.slow
def test_checkpoints_whose_metric_comes_later_are_held_for_it(tmp_path):
    run = tmp_path / "run"
    one = tiers(run, best={"keep": 1})
    one.expect_values(lambda step: step % 2 == 0)
    save(one, range(1, 8), dict.fromkeys(range(1, 8), 0.0))  # what is known at the save does not count
    one.close()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["6", "7", "best"]
    best = run / "checkpoints" / "best"
    assert one.pending() == [2, 4, 6] and sorted(p.name for p in best.iterdir()) == ["pending"]
    # A later process knows them. The value of step 2 was lost: those of later steps are there first.
    one = tiers(run, best={"keep": 1})
    one.expect_values(lambda step: step % 2 == 0)
    one.offer(4, {"eval_loss": 0.5})
    assert one.pending() == [6] and sorted(p.name for p in best.iterdir()) == ["4", "best.json", "pending"]
    one.offer(6, {"eval_loss": 0.7})
    assert one.pending() == []
    save(one, [8])
    one.close()
    one.offer(8, {"eval_loss": 0.1})
    assert json.loads((best / "best.json").read_text())["steps"] == {"8": 0.1}
    assert events(run, "best") == [4, 8]
    np.testing.assert_array_equal(restore_params(best)["head"], np.asarray(make_state(8)["params"]["head"]))


def test_the_highest_may_be_the_best_and_an_unknown_metric_is_refused(tmp_path):
    keeper = KeepBest.Config(metric="accuracy", order="highest").build(directory=tmp_path)
    for step, value in enumerate((0.1, 0.7, 0.3)):
        (tmp_path / str(step)).mkdir()
        assert keeper.offer(step, value) == (step < 2)
    assert keeper.values() == {1: 0.7}
    with pytest.raises(
        UserError, match="keep_best.metric='accuracy': neither evaluators nor metrics have it; did you mean 'acuracy'"
    ):
        keeper.value({"acuracy": 1.0})


def test_the_best_by_another_metric_are_neither_compared_nor_deleted(tmp_path):
    run = tmp_path / "run"
    one = tiers(run, best={})
    save(one, [1, 2], {1: 0.1, 2: 0.2})
    one.close()
    checkpoints = run / "checkpoints"
    accuracy = KeepBest.Config(metric="accuracy", order="highest").build(directory=checkpoints)
    assert accuracy.values() == {}
    assert accuracy.offer(2, 0.05), "0.1 of a loss is no accuracy"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["1", "2", "best", "best-eval_loss"]
    assert sorted(p.name for p in (checkpoints / "best-eval_loss").iterdir()) == ["1", "best.json"]
    assert accuracy.values() == {2: 0.05}
    upside_down = KeepBest.Config(metric="accuracy", order="lowest").build(directory=checkpoints)
    assert upside_down.offer(2, 0.9) and (checkpoints / "best-accuracy" / "2").is_dir()
    assert KeepBest.Config(metric="accuracy", order="highest").build(directory=checkpoints).offer(1, 0.3)
    assert (checkpoints / "best-accuracy-2").is_dir()
