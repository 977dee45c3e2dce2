"""The check on a worker's work, the loop that serves it, the arithmetic of the result, the command."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from tools.bench.grpo_step.job import GrpoJob
from tools.bench.harness.interleave import Measured, measure
from tools.bench.harness.processes import Command, worker_environ
from tools.bench.harness.protocol import GENERATION_FIELDS
from tools.bench.rollout import benchmark as bench
from tools.bench.rollout.job import Completions, check
from tools.cli import EXIT_USER_ERROR, main

JOB = GrpoJob(prompts=2, group=2, new_tokens=3, vocab=10)
GOOD = Completions(
    tokens=[[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 1, 2]],
    logprobs=[[-1.0, -2.0, 0.0]] * 4,
)

WORKER = """
import os
from grpo_step.job import GrpoJob
from rollout.job import Completions, serve
from harness.protocol import StepServer, use_one_core

use_one_core()
job = GrpoJob(prompts=2, group=2, new_tokens=3)
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

def generate(index):
    sum(range({work}))
    return Completions([[cores, index, row] for row in range({rows})], [[-1.0] * 3] * {rows})

serve(job, StepServer("tiny 1.0", parameters=7), generate)
"""


def test_complete_work_passes_and_the_job_is_what_the_engines_are_asked_for() -> None:
    check(JOB, GOOD)
    assert GrpoJob().rollouts == 64 and GrpoJob().new_tokens == 64


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"tokens": GOOD.tokens[:3]}, r"tokens: 3 rows of length \[3\]; expected 4 of 3"),
        ({"logprobs": [[-1.0] * 3] * 3 + [[-1.0]]}, r"logprobs: 4 rows of length \[1, 3\]"),
        ({"tokens": [*GOOD.tokens[:3], [1, 2, 10]]}, "outside the vocabulary of 10"),
        ({"logprobs": [[-1.0, 0.5, -1.0]] * 4}, "positive or not finite"),
        ({"logprobs": [[-1.0, float("nan"), -1.0]] * 4}, "positive or not finite"),
        ({"logprobs": [[-1.0, float("-inf"), -1.0]] * 4}, "positive or not finite"),
        ({"tokens": [*GOOD.tokens[:2], [7, 8, 9], [7, 8, 9]]}, "completions of prompt 1 are the same"),
    ],
)
def test_work_that_was_not_done_is_refused(broken: dict[str, list[list[float]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(JOB, dataclasses.replace(GOOD, **broken))


def test_workers_that_only_generate_take_turns_and_short_work_is_left_out(tmp_path: Path) -> None:
    environ = worker_environ(PYTHONPATH=str(Path(bench.__file__).parents[1]))

    def command(name: str, work: int, rows: int = 4) -> Command:
        script = tmp_path / f"{name}.py"
        script.write_text(WORKER.format(work=work, rows=rows))
        return Command((sys.executable, str(script)), environ)

    results = measure(
        {
            "ours": command("ours", 200_000),
            "tunix": command("tunix", 3_000_000),
            "transformers": command("transformers", 10, rows=3),
        },
        2,
        lambda _: None,
        GENERATION_FIELDS,
    )
    result = bench.summarise(results, 2)
    assert set(result["tok_per_cpu_s"]) == set(result["systems"]) == {"ours", "tunix"}
    assert result["systems"]["ours"]["new_tokens"] == 12
    assert result["vs_tunix"] > 1  # it does fifteen times the work
    assert result["vs_transformers"] is None
    assert "tokens: 3 rows of length [3]; expected 4 of 3" in result["errors"]["transformers"]


def test_ratio_is_the_median_over_rounds_of_tokens_by_cpu_second() -> None:
    results = {
        "ours": _measured([1.0, 3.0, 1.2]),
        "tunix": _measured([2.0, 4.0, 2.0]),
        "transformers": Measured(error="transformers: ended"),
    }
    result = bench.summarise(results, 3)
    assert result["tok_per_cpu_s"] == {
        "ours": pytest.approx(100 / 1.2),
        "tunix": pytest.approx(50.0),
    }
    assert result["vs_tunix"] == pytest.approx(2.0 / 1.2)  # of 2, 4/3 and 5/3
    assert result["vs_transformers"] is None
    assert result["errors"] == {"transformers": "transformers: ended"}
    assert result["systems"]["tunix"]["wall_s"] == 4.0
    assert json.loads(json.dumps(result)) == result


@pytest.mark.full
def test_command_measures_our_engine(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rollout", "--steps", "1", "--json"]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert not result["errors"] and result["tok_per_cpu_s"]["ours"] > 0
    assert result["systems"]["ours"]["new_tokens"] == GrpoJob().new_tokens_per_step
    assert result["versions"]["jax"] and result["date"] and result["machine"]["cores"] >= 1


def test_peer_of_another_benchmark_is_refused_before_anything_runs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "rollout", "--peers", "tunix,trl"]) == EXIT_USER_ERROR
    assert "rollout has no peer 'trl'; known: transformers, tunix" in capfd.readouterr().err


def _measured(cpu: list[float]) -> Measured:
    steps = [{"cpu_s": c, "wall_s": 2 * c, "idle_cpu_s": 0.0, "new_tokens": 100} for c in cpu]
    ready = {
        "first_step_s": 5.0,
        "first_step_cpu_s": 6.0,
        "start_s": 9.0,
        "version": "x 1",
        "parameters": 7,
    }
    return Measured(ready=ready, steps=steps)
