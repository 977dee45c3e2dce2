"""Scores of each sample of a run's evaluations, and two policies compared by them, over problems and noise.

What is drawn depends on (seed, problem, sample, position): two runs of one seed draw sample 3 of a problem with the
same noise, and differ in it only where their policies do.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axlearn_like.run.metrics import read_rows
from mesh.errors import UserError
from mesh.files.written import open_written
from rl.evaluation.pass_at_k import is_correct
from rl.evaluation.samples import SAMPLES
from rl.evaluation.standalone import compare_folders
from rl.evaluation.statistics import compare
from rl.protocol.messages import Group

_FILE = "eval_samples.jsonl"


def write_right(run: Path, step: int, groups: Sequence[Group], seed: int) -> None:
    """Append to a run which samples of an evaluation are right: "0110" of each problem, by its id.

    `seed`: of the draws. A version that is evaluated again has a later row, which counts.
    """
    right = {str(group.prompt.id): "".join(str(int(is_correct(score))) for score in group.scores) for group in groups}
    with open_written(run / _FILE) as file:
        file.write(json.dumps({"step": step, "seed": seed, "right": right}) + "\n")


def compare_evaluated(first: Path, second: Path) -> dict[str, Any] | None:
    """Compare the last evaluations of two runs or folders by `compare`, with "steps" and "same_noise"; None: others."""
    if (first / SAMPLES).exists() and (second / SAMPLES).exists():
        try:
            return {**compare_folders(first, second), "steps": None, "same_noise": _seed(first) == _seed(second)}
        except UserError:
            return None
    evaluated = [read_rows(run / _FILE) for run in (first, second)]
    if not all(evaluated):
        return None
    rows = [max(reversed(found), key=lambda row: row["step"]) for found in evaluated]
    common = [name for name in rows[0]["right"] if name in rows[1]["right"]]
    if not common:
        return None
    right = [[[bit == "1" for bit in row["right"][name]] for name in common] for row in rows]
    compared = compare(right[0], right[1])
    return {**compared, "steps": [row["step"] for row in rows], "same_noise": rows[0]["seed"] == rows[1]["seed"]}


def paired_text(compared: dict[str, Any]) -> str:
    """Return a comparison as one line for people."""
    low, high = compared["difference_ci"]
    points = f"{100 * compared['difference']:+.2f} points of pass@1 on {compared['problems']} problems"
    tests = f"95 % paired bootstrap {100 * low:+.2f} to {100 * high:+.2f}; McNemar p = {compared['mcnemar_p']:.3g}"
    if (unpaired := compared["unpaired_problems"]) is None:
        return f"{points} ({tests})"
    return f"{points} ({tests}); an unpaired test would need {unpaired} problems for as narrow an interval"


def _seed(folder: Path) -> Any:
    return json.loads((folder / "evaluation.json").read_text()).get("seed")
