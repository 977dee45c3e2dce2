"""The inline verifier scores as the pool does, without processes."""

from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer


def length_or_error(problem_id: int, answer: str) -> float:
    return problem_id + float(answer)


def test_scores_in_order_and_errors_are_no_reward():
    scorer = FunctionScorer.Config(function=length_or_error)
    with InlineVerifier.Config(scorer=scorer).build() as verifier:
        scores = verifier.score([1, 2, 3], ["0.5", "not a number", "4"])
    assert [(s.reward, s.status) for s in scores] == [(1.5, "ok"), (0.0, "error"), (7.0, "ok")]
