"""The interval between checkpoints that failures ask for."""

from pathlib import Path
from typing import Any

import numpy as np

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.interval import SaveInterval, best_seconds, chosen_interval


def row(time: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "role": "trainer", "event": event, **fields}


def goodput(time: float, since: int, until: int, **causes: float) -> dict[str, Any]:
    return row(time, "goodput", since=since, step=until, seconds=sum(causes.values()), causes=causes)


def test_the_best_interval_is_that_of_the_least_expected_loss() -> None:
    seconds = np.linspace(1.0, 4000.0, 400_000)
    for save, mtbf in ((2.0, 3600.0), (30.0, 86400.0)):
        lost = save / seconds + seconds / 2 / mtbf  # of a second: of saves, and half an interval for each failure
        assert abs(seconds[lost.argmin()] - best_seconds(save, mtbf)) < 0.02


def test_an_interval_follows_from_what_the_run_has_cost_so_far() -> None:
    begin = [row(0.0, "train_begin", step=0), goodput(50.0, 0, 100, step=40.0, input=8.0, checkpoint=2.0)]
    begin += [row(50.0, "saved", step=100)]
    assert chosen_interval(begin) is None, "nothing has failed"
    ended = [*begin, row(60.0, "train_end", step=110), row(90.0, "train_begin", step=110)]
    assert chosen_interval(ended) is None, "it was stopped in order"
    died = [*begin, row(100.0, "train_begin", step=100)]
    # sqrt(2 * 2 s of a save * 100 s between failures) = 20 s, of steps of 0.48 s.
    assert chosen_interval(died) == SaveInterval(42, 2.0, 100.0)
    assert chosen_interval([*died, row(120.0, "train_begin", step=100)]) == SaveInterval(32, 2.0, 60.0)


def test_it_is_used_where_no_interval_is_set_and_adds_to_the_usual_steps(tmp_path: Path) -> None:
    chosen = SaveInterval(42, 2.0, 100.0)
    free, fixed = (Checkpointer.Config(save_every=every).build(directory=tmp_path) for every in (None, 50))
    assert free.choose(chosen) and not fixed.choose(chosen)
    assert not free.choose(None) and not free.choose(SaveInterval(500, 2.0, 1e6))
    assert [step for step in range(211) if free.should_save(step)] == [42, 84, 100, 126, 168, 200, 210]
    assert [step for step in range(211) if fixed.should_save(step)] == [50, 100, 150, 200]
