"""Each task of an evaluation is scored by its own verifier."""

import json
from pathlib import Path

import pytest

from axlearn_like.config import ConfigError
from experiments.datasets import by_tests, humaneval
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.datasets import rows
from rl.verification.scorers import ReasoningGymScorer, Scorer
from rl.verification.service import Verifier
from rl.verification.verifiers.by_task import ByTask

CODE = {
    "task_id": "0",
    "prompt": 'def double(x):\n    """Return twice x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
}
WORDS = {"prompt": "The opposite of left?", "answer": "right"}


def mixture(folder: Path) -> TaskMixture.Config:
    for name, row in (("code", CODE), ("words", WORDS)):
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    families = (humaneval(str(folder / "code.jsonl")), rows(str(folder / "words.jsonl")).set(label="words"))
    return TaskMixture.Config(families=tuple(one.set(heldout=one.rows.clone()) for one in families))


def test_code_is_run_and_words_are_compared(tmp_path: Path):
    tasks = mixture(tmp_path)
    other = ReasoningGymScorer.Config(mixture=tasks, pass_mark=1.0)
    scorers: dict[str, Scorer.Config] = {"humaneval": by_tests(tasks)}
    by_task = ByTask.Config(mixture=tasks, scorers=scorers, other=other)
    problems = {problem.family: problem.id for problem in tasks.build().heldout(1)}
    answers = [
        ("humaneval", "    return x + x\n", 1.0),
        ("humaneval", "    return x\n", 0.0),
        ("words", "right", 1.0),
        ("words", "    return x + x\n", 0.0),
    ]
    with Verifier.Config(scorer=by_task, processes=1).build() as verifier:
        scores = verifier.score([problems[task] for task, _, _ in answers], [answer for _, answer, _ in answers])
    assert [(score.status, score.reward) for score in scores] == [("ok", wanted) for _, _, wanted in answers]


def test_a_task_that_is_not_there_is_refused(tmp_path: Path):
    tasks = mixture(tmp_path)
    other = ReasoningGymScorer.Config(mixture=tasks)
    with pytest.raises(ConfigError, match=r"scorers: expected labels of tasks; did you mean 'humaneval'"):
        ByTask.Config(mixture=tasks, scorers={"human_eval": other.clone()}, other=other).check()
