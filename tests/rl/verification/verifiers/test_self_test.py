"""Verifiers tell wrong answers made from right ones from right ones in other words, and say so when they cannot."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.input.source import InputError
from rl.verification.scorers import FunctionScorer, Scorer
from rl.verification.verifiers.code import CodeVerifier, code_of
from rl.verification.verifiers.math import MathVerifier
from rl.verification.verifiers.self_test import CASES, VERIFIERS, Case, Rows, mutants_of_code, self_test
from rl.verification.verifiers.text import ExactMatch


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_a_verifier_passes_its_self_test(name: str):
    result = self_test(VERIFIERS[name], CASES[name])
    assert result.mistakes == ()
    assert result.tried >= 12


def says_yes(problem_id: int, answer: str) -> float:
    return 1.0


def test_a_verifier_that_says_yes_to_all_does_not_pass():
    result = self_test(lambda rows: FunctionScorer.Config(function=says_yes), CASES["exact"])
    assert len(result.mistakes) == sum(len(case.wrong) for case in CASES["exact"])


def length(problem_id: int, answer: str) -> float:
    if answer == "raise":
        raise ValueError("not now")
    return float(len(answer))


def test_a_score_without_scale_must_rank_right_answers_above_wrong_ones():
    config = lambda rows: FunctionScorer.Config(function=length)  # noqa: E731
    good = Case({}, ["abcd", "abc"], ["ab", ""])
    assert self_test(config, [good], ranked=True).mistakes == () and len(self_test(config, [good]).mistakes) == 3
    bad = Case({}, ["abcd", "abc"], ["abc", "ab", "raise", "abcde"])
    assert self_test(config, [good, bad], ranked=True).mistakes == (
        (1, "abc", "3, expected less than 3"),
        (1, "raise", "ValueError: not now"),
        (1, "abcde", "5, expected less than 3"),
    )
    for case in CASES["reward_model"]:
        assert len(set(case.wrong)) >= 5 and not set(case.right) & set(case.wrong)


def test_patterns_pick_what_is_judged():
    row = {"answer": "She makes 9 * 2 = $18.\n#### 18"}
    rows = Rows.Config(rows=(row,))
    picked: dict[str, Any] = {"answer_pattern": r"ANSWER: (.+)", "reference_pattern": r"#### (.+)"}
    scorer = MathVerifier.Config(mixture=rows, **picked).build()
    assert scorer.score(0, "ANSWER: 3\nno, ANSWER: 36/2") == 1.0
    assert scorer.score(0, "18") == 0.0
    with pytest.raises(LookupError, match="the reference of problem 0 has no"):
        MathVerifier.Config(mixture=Rows.Config(rows=({"answer": "18"},)), **picked).build().score(0, "ANSWER: 18")
    with pytest.raises(InputError, match="the row of problem 0: there is no field 'key'; known: answer"):
        ExactMatch.Config(mixture=rows, field="key").build().score(0, "18")


def test_gsm8k_references_are_right_and_their_neighbours_wrong(shared_data: Path):
    with gzip.open(shared_data / "gsm8k" / "test.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file][:200]
    cases = []
    for row in rows:
        value = row["answer"].rpartition("#### ")[2]
        number = int(value.replace(",", ""))
        right = [f"#### {text}" for text in (value, f"{number}.0", f"{2 * number}/2")]
        cases.append(
            Case(row, right, [f"#### {wrong}" for wrong in (number + 1, -number or 1, f"{number}0")] + [value])
        )
    patterns: dict[str, Any] = {"answer_pattern": "#### (.+)", "reference_pattern": "#### (.+)"}
    cases = [case for case in cases if not case.row["answer"].endswith("#### 0")]
    result = self_test(lambda tasks: MathVerifier.Config(mixture=tasks, **patterns), cases)
    assert result.mistakes == ()


@pytest.fixture
def humaneval(shared_data: Path) -> list[dict[str, str]]:
    with gzip.open(shared_data / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def code(rows: Rows.Config) -> Scorer.Config:
    return CodeVerifier.Config(mixture=rows, prompt_field="prompt")


def check_humaneval(rows: list[dict[str, str]], make: Callable[[Rows.Config], Scorer.Config] = code) -> None:
    cases = [
        Case(
            row,
            [row["canonical_solution"], f"```python\n{row['prompt']}{row['canonical_solution']}```"],
            ["    pass\n", "    return 12345.678\n"],
        )
        for row in rows
    ]
    assert self_test(make, cases).mistakes == ()


def test_solutions_of_humaneval_pass(humaneval: list[dict[str, str]]):
    check_humaneval(humaneval[30:36])  # among them tests that need a function of the prompt


@pytest.mark.full
def test_all_solutions_of_humaneval_pass_and_most_mutants_do_not(humaneval: list[dict[str, str]]):
    check_humaneval(humaneval)
    scorer = code(Rows.Config(rows=tuple(humaneval))).build()
    scores = [
        scorer.score_samples(index, [mutant], [])[0]["reward"]
        for index, row in enumerate(humaneval)
        for mutant in mutants_of_code(row["canonical_solution"], 2)
    ]
    assert len(scores) > 200
    assert sum(scores) / len(scores) < 0.2  # equivalent ones, and those that the tests of HumanEval do not see


def test_slow_programs_end_in_time():
    cases = [{"input": "", "output": ""}] * 50
    cfg = CodeVerifier.Config(mixture=Rows.Config(rows=({"cases": cases},)), answer_s=3.0)
    score = cfg.build().score_samples(0, ["import time; time.sleep(0.4)"], [])[0]
    assert (score["reward"], score["timeout"]) == (0.0, 1.0)
    assert 0.0 < score["passed"] <= 7 / 50


def test_fenced_code_is_found():
    assert code_of("Text\n```python\na = 1\n```\nand\n```py\nb = 2\n```") == "b = 2\n"
    assert code_of(" a = 1 ") == "a = 1"
