"""The verifier's scores are reasoning-gym's own, and a function's own."""

import contextlib
import importlib
import re

import pytest

from axlearn_like.config import from_text, to_text
from rl.tasks import family
from rl.tasks.family import TaskFamily
from rl.tasks.mixture import TaskMixture
from rl.tasks.reasoning_gym import import_reasoning_gym
from rl.verification.scorers import FunctionScorer, ReasoningGymScorer
from rl.verification.service import Verifier
from tests.rl.verification import misbehaving

MIXTURE = TaskMixture.Config(
    families=(
        TaskFamily.Config(name="chain_sum"),
        TaskFamily.Config(name="number_sorting"),  # partial credit
        TaskFamily.Config(name="prime_factorization"),  # raises on letters
        TaskFamily.Config(name="decimal_arithmetic"),  # partial credit by closeness
    ),
    seed=5,
)


@pytest.mark.slow
def test_scores_are_reasoning_gyms_own():
    mixture = MIXTURE.build()
    problems = [mixture.train(i) for i in range(60)]
    cases = []
    for problem in problems:
        near = problem.answer[:-1] + "7"
        answers = [problem.answer, near, f"It is {problem.answer}.", "", "12", "zz"]
        cases += [(problem, answer) for answer in answers]
    gym = import_reasoning_gym()
    with Verifier.Config(scorer=ReasoningGymScorer.Config(mixture=MIXTURE)).build() as verifier:
        scores = verifier.score([p.id for p, _ in cases], [a for _, a in cases])
        stats = verifier.stats()
    errors = 0
    for (problem, answer), score in zip(cases, scores, strict=True):
        scorer = gym.get_score_answer_fn(problem.family)
        try:
            expected, status = scorer(answer, problem.entry), "ok"
        except Exception:
            expected, status = 0.0, "error"
            errors += 1
        assert (score.reward, score.status) == (expected, status), (problem, answer)
    assert len({s.reward for s in scores}) > 3
    assert errors > 0
    assert stats["error"] == errors
    assert stats["scored"] == len(cases) == stats["ok"] + errors
    assert "ValueError: invalid literal for int()" in stats["last_error"]


def test_a_function_is_a_scorer_by_its_name():
    config = FunctionScorer.Config(function=misbehaving.digits)
    assert "misbehaving" in to_text(config)
    scorer = from_text(to_text(config)).build()
    assert scorer.score(0, "ab12") == 0.5


@pytest.mark.slow
def test_a_scorer_that_takes_any_answer_is_not_asked():
    life = TaskMixture.Config(families=(TaskFamily.Config(name="game_of_life_halting"),))
    scorer, problem = ReasoningGymScorer.Config(mixture=life).build(), life.build().problem(0)
    assert [scorer.score(0, text) for text in (problem.answer, "no answer", "")] == [1.0, 0.0, 0.0]


def wrong(answer: str) -> list[str]:
    """Return wrong answers made from a right one: nothing, words, another first digit, half of a text."""
    digit = re.search(r"[1-9]", answer)
    other = [f"{answer[: digit.start()]}{int(digit[0]) % 9 + 1}{answer[digit.end() :]}"] if digit else []
    half = [] if re.fullmatch(r"[-+.\d]+", answer) else [answer[: len(answer) // 2]]  # of a number it may be a rounding
    return ["", "no answer", *other, *half]


@pytest.mark.full
def test_all_families_tell_wrong_answers_made_from_right_ones():
    factory = importlib.import_module("reasoning_gym.factory")
    names = sorted({*factory.DATASETS} - {*family._NOT_REPRODUCIBLE, *family._NEEDS_DATASETS, *family._NO_ANSWERS})
    passed: dict[str, str] = {}
    for name in names:
        mixture = TaskMixture.Config(families=(TaskFamily.Config(name=name),))
        scorer, tasks = ReasoningGymScorer.Config(mixture=mixture, pass_mark=1.0).build(), mixture.build()
        for number in range(2):
            answer = tasks.problem(number).answer
            assert scorer.score(number, answer) == 1.0, name
            for one in wrong(answer):
                with contextlib.suppress(Exception):  # what raises is no reward
                    if scorer.score(number, one) == 1.0:
                        passed[name] = one
    assert len(names) > 85 and passed == {}
