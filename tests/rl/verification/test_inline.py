"""The inline verifier scores as the pool does, without processes."""

import math
from typing import Any

import numpy as np
import pytest

from rl.verification.failures import STOP_AFTER, ScorerFails
from rl.verification.inline import InlineVerifier
from rl.verification.rewards import NotAReward, check_rewards
from rl.verification.scorers import FunctionScorer


def length_or_error(problem_id: int, answer: str) -> float:
    return problem_id + float(answer)


def test_scores_in_order_and_errors_are_no_reward():
    scorer = FunctionScorer.Config(function=length_or_error)
    with InlineVerifier.Config(scorer=scorer).build() as verifier:
        scores = verifier.score([1, 2, 3], ["0.5", "not a number", "4"])
    assert [(s.reward, s.status) for s in scores] == [(1.5, "ok"), (0.0, "error"), (7.0, "ok")]
    assert scores[1].error == "ValueError: could not convert string to float: 'not a number'"


@pytest.mark.parametrize("value", [math.nan, math.inf, "1.0", None, [1.0], b"1", 1j, {"a": 1.0}, {"reward": "1"}])
def test_what_is_no_finite_number_is_no_reward(value: Any):
    with pytest.raises(NotAReward, match=r"expected a finite number|without their sum|returned inf"):
        check_rewards([value], 1)


@pytest.mark.parametrize("values", [None, 1.0, "11", [1.0], [1.0, 1.0, 1.0], {"reward": 1.0}])
def test_a_list_of_another_length_is_no_reward(values: Any):
    with pytest.raises(NotAReward, match=r"expected a list of numbers|values for 2 answers"):
        check_rewards(values, 2)


def test_numbers_of_every_kind_are_rewards():
    values = [1, 0.5, True, np.float32(0.25), np.int64(2), np.True_, {"reward": 3, "length": np.float64(-1)}]
    assert check_rewards(values, 7)[:6] == [(1.0, {}), (0.5, {}), (1.0, {}), (0.25, {}), (2.0, {}), (1.0, {})]
    assert check_rewards(values, 7)[6] == (3.0, {"length": -1.0})


def raise_system_error(problem_id: int, answer: str) -> float:
    if answer:
        raise OSError("the answer key is missing")
    return 1.0


def test_a_scorer_that_always_fails_stops_the_run():
    with InlineVerifier.Config(scorer=FunctionScorer.Config(function=raise_system_error)).build() as verifier:
        verifier.score(range(STOP_AFTER), ["x"] * (STOP_AFTER - 1) + [""])  # one of them was scored
        verifier.score(range(STOP_AFTER - 1), ["x"] * (STOP_AFTER - 1))
        with pytest.raises(ScorerFails, match=rf"last {STOP_AFTER} answers.*problem 7: error: OSError: the answer key"):
            verifier.score([7], ["x"])
