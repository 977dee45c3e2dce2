"""The verifier's scores are reasoning-gym's own, and a function's own."""

from axlearn_like.config import from_text, to_text
from rl.tasks.mixture import TaskFamily, TaskMixture
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
