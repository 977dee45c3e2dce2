"""Two runs compared by the scores of each sample of their last evaluations."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from rl.evaluation.paired import compare_evaluated, paired_text, write_right
from rl.evaluation.statistics import compare
from rl.protocol.messages import Group
from tests.rl.tiny import make_group, make_prompt
from tools.commands.runs.compare import command


def groups(right: np.ndarray) -> list[Group]:
    """A group for each problem, with these samples right."""
    return [
        make_group(make_prompt(number, 3), [[65]] * len(row), row.tolist(), version=0)
        for number, row in enumerate(right)
    ]


def evaluated(folder: Path, right: np.ndarray, step: int = 4, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    write_right(folder, step, groups(right), seed)
    return folder


def test_the_last_evaluations_of_two_runs_are_paired_by_problem_and_sample(tmp_path: Path):
    rng = np.random.default_rng(0)
    noise, chance = rng.random((50, 4)), rng.random((50, 1))
    first, second = noise < chance, noise < chance + 0.05
    a = evaluated(tmp_path / "a", np.zeros((50, 4), bool), step=2)
    assert compare_evaluated(a, tmp_path / "none") is None
    evaluated(a, ~first)  # is evaluated again, after a crash
    evaluated(a, first)
    b = evaluated(tmp_path / "b", second[:40], step=6)
    found = compare_evaluated(a, b)
    expected = compare(first[:40].tolist(), second[:40].tolist())
    assert found == {**expected, "steps": [4, 6], "same_noise": True}
    assert expected["unpaired_problems"] > 100
    assert found is not None and f"would need {expected['unpaired_problems']} problems" in paired_text(found)
    other = compare_evaluated(a, evaluated(tmp_path / "c", second, seed=1))
    assert other is not None and not other["same_noise"]
    same = compare_evaluated(a, a)
    assert same is not None and same["unpaired_problems"] is None and "unpaired" not in paired_text(same)
    (tmp_path / "b" / "eval_samples.jsonl").write_text(json.dumps({"step": 1, "seed": 0, "right": {"99": "01"}}) + "\n")
    assert compare_evaluated(a, b) is None, "no problem in common"


def test_folders_of_evaluations_are_compared_by_the_command(tmp_path: Path):
    for name, rewards in (("a", (1, 0, 0)), ("b", (1, 1, 0))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "evaluation.json").write_text('{"seed": 3}')
        rows = [
            {
                "problem": n,
                "family": "f",
                "question": f"q{n}",
                "expected": "",
                "samples": [{"reward": r, "status": "ok"}],
            }
            for n, r in enumerate(rewards)
        ]
        (tmp_path / name / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = CliRunner().invoke(command, [str(tmp_path / "a"), str(tmp_path / "b")], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "+33.33 points of pass@1 on 3 problems" in shown.output and "the same noise" in shown.output
    assert compare_evaluated(tmp_path / "a", tmp_path / "b")["unpaired_problems"] == pytest.approx(6)  # pyright: ignore
