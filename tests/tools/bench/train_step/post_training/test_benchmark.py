"""The tokens that our trainer gets, its steps, and the arithmetic of the result."""

import contextlib
import json
import math
from typing import Any

import numpy as np
import pytest

from tools.bench.harness.interleave import Measured
from tools.bench.train_step.post_training import benchmark as bench
from tools.bench.train_step.post_training.job import EOS, JOBS
from tools.bench.train_step.post_training.ours import (
    dpo_equal,
    dpo_gsm8k,
    dpo_quick,
    sft_equal,
    sft_gsm8k,
    sft_quick,
)
from tools.cli import EXIT_USER_ERROR, main


def test_a_step_of_either_sees_every_example_once() -> None:
    job = JOBS["quick"]
    with contextlib.closing(sft_quick().input.build()) as data:
        for _ in range(3):  # in any order
            batch = next(data)
            texts = [batch["targets"][row, batch["segment_ids"][row] == n] for row, n in _segments(batch)]
            expected = [(row["prompt"] + row["completion"]).encode()[1:] + bytes([EOS]) for row in job.texts()]
            assert sorted(bytes(text.astype(np.uint8)) for text in texts) == sorted(expected)
            assert (batch["weights"] > 0).sum() == sum(completion for _, completion in job.lengths)
    with contextlib.closing(dpo_quick().input.build()) as data:
        batch = next(data)
        sides = [batch["tokens"][row, batch["segment_ids"][row] == n] for row, n in _segments(batch)]
        expected = [(row["prompt"] + row[side]).encode() + bytes([EOS])
                    for row in job.pairs() for side in ("chosen", "rejected")]  # fmt: skip
        assert sorted(bytes(side.astype(np.uint8)) for side in sides) == sorted(expected)


def test_a_batch_is_no_more_rows_than_its_tokens_need() -> None:
    for cfg, examples in ((sft_gsm8k(), 32), (dpo_gsm8k(), 16), (sft_equal(), 64), (dpo_equal(), 32)):
        with contextlib.closing(cfg.input.build()) as data:
            batch = next(data)
            assert int((batch["positions"] == 0).sum()) >= examples and data.metrics()["packing"] > 0.8


@pytest.mark.full
@pytest.mark.parametrize(("kind", "first"), [("sft", math.log(128)), ("dpo", math.log(2))])
def test_our_trainer_serves_steps_in_tiny(kind: Any, first: float) -> None:
    result = bench.run(kind, [], 1, lambda line: None, quick=True)
    assert result["errors"] == {} and result["ours_cpu_s_per_step"] > 0 and result["ratio_to_best_peer"] is None
    losses = result["losses"]["ours"]  # of all steps but the last, which is on disk only after it
    assert len(losses) == 4 and losses[0] == pytest.approx(first, rel=0.1) and losses == sorted(losses, reverse=True)


def test_ratio_is_over_rounds_and_losses_are_compared_step_by_step() -> None:
    results = {
        "ours gsm8k": _measured([1.0, 3.0, 1.2], [5.0, 4.0]),
        "trl gsm8k": _measured([2.0, 4.0, 2.0], [5.0, 4.25, 3.0]),
        "ours equal": _measured([2.0], [5.0]),
        "trl equal": Measured(error="trl: ended with status 1"),
    }
    result = bench.summarise("sft", results, 3)
    assert result["bench"] == "sft_step" and result["best_peer"] == "trl" and set(result["peers"]) == {"trl"}
    assert result["ratio_to_best_peer"] == pytest.approx(0.6)  # of 0.5, 0.75, 0.6
    assert result["loss_difference"] == 0.25
    assert result["equal"]["ratio_to_best_peer"] is None and result["equal"]["loss_difference"] is None
    assert result["equal"]["ours_cpu_s_per_step"] == 2.0
    assert result["errors"] == {"trl equal": "trl: ended with status 1"}
    assert json.loads(json.dumps(result)) == result


def test_unknown_peer_is_refused_before_anything_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "dpo_step", "--peers", "tlr"]) == EXIT_USER_ERROR
    assert "dpo_step has no peer 'tlr'; did you mean 'trl'" in capfd.readouterr().err
    assert main(["bench", "dpo-step"]) == EXIT_USER_ERROR
    assert "did you mean 'dpo_step'" in capfd.readouterr().err


def _segments(batch: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """Return (row, number) of every sequence of a batch."""
    return [(row, n) for row, ids in enumerate(batch["segment_ids"]) for n in range(1, int(ids.max()) + 1)]


def _measured(cpu: list[float], losses: list[float]) -> Measured:
    steps: list[Any] = [{"cpu_s": c, "wall_s": 2 * c, "idle_cpu_s": 0.0, "losses": losses} for c in cpu]
    return Measured(ready={"first_step_s": 9.0, "version": "x 1", "parameters": 7}, steps=steps)
