"""The arithmetic of the result, the command's errors."""

import json

import pytest

from tools.bench.grpo_step import benchmark as bench
from tools.bench.grpo_step.job import GrpoJob, digit_share
from tools.bench.harness.interleave import Measured
from tools.cli import EXIT_USER_ERROR, main


def test_ratio_is_the_median_over_rounds_against_the_best_peer() -> None:
    results = {
        "ours": _measured([1.0, 3.0, 1.2]),
        "slow": _measured([1.9, 9.0, 9.0]),  # quicker than the best in one round, not over all
        "best": _measured([2.0, 4.0, 2.0]),
        "bad": Measured(error="bad: ended with status 1"),
    }
    starts = [{"first_step_s": s, "first_step_cpu_s": 2 * s, "start_s": 3 * s} for s in (3.0, 1.0, 2.0)]
    result = bench.summarise(results, 3, starts)
    assert result["best_peer"] == "best" and set(result["peers"]) == {"slow", "best"}
    assert result["errors"] == {"bad": "bad: ended with status 1"}
    assert result["ratio_to_best_peer"] == pytest.approx(0.6)  # of 0.5, 0.75, 0.6
    assert result["ours_cpu_s_per_step"] == 1.2
    assert result["ours_gen_tok_per_cpu_s"] == pytest.approx(100 / 0.6)
    assert result["ours_first_step_s"] == 5.0
    assert result["ours_first_step_warm_s"] == 2.0 and result["ours_first_step_warm_cpu_s"] == 4.0
    assert result["ours_start_warm_s"] == 6.0
    best = result["peers"]["best"]
    assert best["cpu_s_per_step"] == 2.0 and best["wall_s_per_step"] == 4.0
    assert best["gen_tok_per_cpu_s"] == pytest.approx(100.0)
    assert best["version"] == "x 1" and best["first_step_s"] == 5.0
    assert set(result["machine"]) == {"cores", "cpu", "load"} and result["machine"]["cores"] >= 1
    assert json.loads(json.dumps(result)) == result


def test_without_a_peer_or_without_ours_there_is_no_ratio() -> None:
    alone = bench.summarise({"ours": _measured([1.0])}, 1)
    assert alone["peers"] == {} and alone["ratio_to_best_peer"] is None and alone["ours_first_step_warm_s"] is None
    peers_only = bench.summarise({"ours": Measured(error="ours: ended"), "trl": _measured([2.0])}, 1)
    assert peers_only["ours_cpu_s_per_step"] is None and peers_only["ratio_to_best_peer"] is None
    assert peers_only["errors"] == {"ours": "ours: ended"}


def test_unknown_names_are_refused_with_the_nearest_before_anything_runs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "grpo_step", "--peers", "trl,tunics"]) == EXIT_USER_ERROR
    assert "no peer 'tunics'; did you mean 'tunix'" in capfd.readouterr().err
    assert main(["bench", "grpo-step"]) == EXIT_USER_ERROR
    assert "no benchmark 'grpo-step'; did you mean 'grpo_step'" in capfd.readouterr().err


def test_job_is_the_same_for_all_and_differs_by_step() -> None:
    job = GrpoJob()
    assert job.rollouts == 64 and job.new_tokens_per_step == 4096
    assert job.prompt_texts(3) == job.prompt_texts(3) != job.prompt_texts(4)
    assert {len(text) for text in job.prompt_texts(0)} == {32}
    assert digit_share("1a2b") == 0.5 and digit_share("") == 0.0 and digit_share("²") == 0.0


def _measured(cpu: list[float]) -> Measured:
    steps = [{"cpu_s": c, "wall_s": 2 * c, "gen_cpu_s": c / 2, "new_tokens": 100, "reward": 0.5} for c in cpu]
    ready = {"first_step_s": 5.0, "start_s": 9.0, "version": "x 1", "parameters": 7}
    return Measured(ready=ready, steps=steps)
