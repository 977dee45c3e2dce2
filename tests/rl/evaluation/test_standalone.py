"""An evaluation by itself: figures of its own samples, the same files after a kill, and pairs of two policies."""

import json
from pathlib import Path
from typing import Any

import pytest

from mesh.errors import UserError
from rl.evaluation.pass_at_k import pass_at_k
from rl.evaluation.samples import Samples, earlier_tokens
from rl.evaluation.standalone import Respondent, compare_folders, evaluate, figures
from rl.experiment import RLExperiment
from rl.rollout.engine import RolloutEngine
from rl.tasks.mixture import TaskMixture
from rl.tasks.prompts import PromptMaker
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from tests.rl.tiny import tiny_experiment, tiny_params

CFG = tiny_experiment()
EXPERIMENT: RLExperiment = CFG.build()


def questions() -> list[dict[str, str]]:
    return [{"prompt": f"q{n}", "answer": "x"} for n in range(5)]


ROWS = RowFunction.Config(function=questions)
TASKS: TaskMixture = TaskMixture.Config(families=(TaskRows.Config(rows=ROWS, heldout=ROWS.clone(), label="q"),)).build()


def first_is_ascii(problem_id: int, answer: str) -> float:
    if problem_id % 5 == 4 and answer:
        raise ValueError("cannot read this")
    return float(answer[:1].isascii() and bool(answer))


VERIFIER = InlineVerifier.Config(scorer=FunctionScorer.Config(function=first_is_ascii)).build()
COUNT = 4


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return EXPERIMENT.make_engine()


class Killed(Exception):
    """Stands for kill -9 between two problems."""


def run(
    folder: Path,
    engine: RolloutEngine,
    *,
    seed: int = 0,
    kill_after: int | None = None,
    at_once: int = 2,
    near: Path | None = None,
) -> Any:
    def progress(done: int) -> None:
        if done == kill_after:
            raise Killed

    problems = TASKS.for_evaluation(None, 9)
    maker = PromptMaker(EXPERIMENT.tokenizer, max_prompt_tokens=12)
    samples = Samples(folder, {"seed": seed, "policy": "tiny"})
    earlier = {} if near is None else earlier_tokens(near, seed)
    tiny = Respondent(engine, EXPERIMENT.tokenizer, VERIFIER, maker, at_once, earlier=earlier)
    return evaluate(samples, problems, TASKS, tiny, count=COUNT, ks=(1, 4), seed=seed, progress=progress)


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_to_the_same_files_and_pairs_are_compared(engine: RolloutEngine, tmp_path: Path):
    engine.set_weights(tiny_params(CFG.policy, scale=1.0), 1)  # pyright: ignore
    whole = run(tmp_path / "whole", engine)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "samples.jsonl").read_text().splitlines()]
    right = [sum(s["reward"] == 1 for s in row["samples"]) for row in rows]
    assert [row["question"] for row in rows] == [f"q{n}" for n in range(5)] and len(rows[0]["samples"]) == COUNT
    for k in (1, 4):
        assert whole[f"pass@{k}"] == pytest.approx(sum(pass_at_k(COUNT, c, k) for c in right) / 5)
    assert whole["maj@1"] == pytest.approx(whole["pass@1"]) and 0 < whole["pass@1"] < 1
    failed = [sample for row in rows for sample in row["samples"] if sample["status"] == "error"]
    assert whole["failed"] == {"error": len(failed)} and "cannot read this" in failed[0]["error"]
    # Killed behind the third problem, in the middle of the fourth's row; then in other portions.
    with pytest.raises(Killed):
        run(tmp_path / "killed", engine, kill_after=3)
    with open(tmp_path / "killed" / "samples.jsonl", "a") as file:
        file.write('{"problem": 3, "samp')
    assert run(tmp_path / "killed", engine, at_once=3) == whole
    for name in ("samples.jsonl", "result.json", "evaluation.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(UserError, match="holds an evaluation with seed = 0, not 1"):
        run(tmp_path / "whole", engine, seed=1)

    engine.set_weights(tiny_params(CFG.policy, seed=1, scale=1.0), 2)  # pyright: ignore
    other = run(tmp_path / "other", engine)
    # Drafts are the other policy's samples, also behind a kill; the files are the same.
    assert not earlier_tokens(tmp_path / "whole", seed=1)
    engine.earlier.adaptive = False
    with pytest.raises(Killed):
        run(tmp_path / "near", engine, kill_after=2, near=tmp_path / "whole")
    assert run(tmp_path / "near", engine, near=tmp_path / "whole") == other
    assert engine.earlier.counts["coupled_drafted_tokens"] > 20
    assert (tmp_path / "near" / "samples.jsonl").read_bytes() == (tmp_path / "other" / "samples.jsonl").read_bytes()
    compared = compare_folders(tmp_path / "whole", tmp_path / "other")
    assert (compared["first"], compared["second"]) == pytest.approx((whole["pass@1"], other["pass@1"]))
    assert compared["problems"] == 5 and compared["unpaired"] == [0, 0] and list(compared["families"]) == ["q"]
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="has no samples of an evaluation"):
        compare_folders(tmp_path / "whole", tmp_path / "none")


def test_answers_that_are_cut_off_are_counted():
    problems = TASKS.for_evaluation(None, 9)[:2]
    drawn = [{"answer": "", "reward": 0.0, "status": "ok", "finish_reason": reason} for reason in ("length", "stop")]
    rows = [{"problem": one.id, "family": "q", "samples": drawn} for one in problems]
    assert figures(rows, problems, TASKS, ks=(1,), seed=0)["families"]["q"]["cut_off"] == 2
    ended = [{**row, "samples": drawn[1:]} for row in rows]
    assert "cut_off" not in figures(ended, problems, TASKS, ks=(1,), seed=0)["families"]["q"]
