"""The soft overlong penalty of DAPO at the points where its formula changes; the gradient of KL in the reward."""

import itertools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from mesh.errors import UserError
from rl.objective import Objective, RawReward, ReferencePenalty, RewardToGo, SoftOverlongPenalty
from rl.objective.rollouts import PerToken

pytestmark = pytest.mark.numerics


def test_equals_equation_13():
    shaping = SoftOverlongPenalty.Config(max_length=20, buffer=4).build()
    lengths = np.array([1, 16, 17, 18, 20, 25])
    got = shaping(np.ones(6), lengths)
    np.testing.assert_allclose(got, [1, 1, 0.75, 0.5, 0, 0])


@pytest.mark.parametrize("buffer", [0, 21])
def test_buffer_is_checked(buffer):
    with pytest.raises(UserError, match=f"buffer: expected 1 to max_length=20, got {buffer}"):
        SoftOverlongPenalty.Config(max_length=20, buffer=buffer).build()


@pytest.mark.parametrize("level", ["rollout", "token"])
def test_k1_in_the_reward_has_the_gradient_of_the_kl(level: Literal["rollout", "token"]):
    """All rollouts of two tokens of three, weighted by their probability: float64, by central differences.

    By token each is charged with its own divergence and those behind it, whose sum has the same expected gradient.
    """
    rng = np.random.default_rng(0)
    logits, reference = rng.normal(size=(2, 3)), rng.normal(size=(2, 3))
    rewards, rollouts = rng.random(9), np.array(list(itertools.product(range(3), range(3))))
    coef = 0.7

    def logp(table: np.ndarray) -> np.ndarray:
        whole = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
        return whole[[0, 1], rollouts]  # [rollouts, tokens]

    def objective_of(table: np.ndarray) -> float:
        mine = logp(table).sum(axis=1)
        return float(np.sum(np.exp(mine) * (rewards - coef * (mine - logp(reference).sum(axis=1)))))

    def slope(f: Callable[[np.ndarray], Any]) -> np.ndarray:
        step = 1e-6
        found = []
        for index in np.ndindex(2, 3):
            moved = np.zeros((2, 3))
            moved[index] = step
            found.append((f(logits + moved) - f(logits - moved)) / (2 * step))
        return np.array(found)

    penalty = ReferencePenalty.Config(coef=coef, level=level)
    advantage = RawReward.Config(baseline=0.3) if level == "rollout" else RewardToGo.Config(whiten=False)
    objective = Objective.Config(advantage=advantage, reward_shaping=penalty).build()
    divergence = logp(logits) - logp(reference)
    prepared = objective.prepare(
        rewards, np.ones((9, 2), bool), groups=np.zeros(9, int), per_token=PerToken(divergence)
    )
    charged = divergence.sum(axis=1, keepdims=True) + np.zeros((1, 2))
    if level == "token":
        charged[:, 1] = divergence[:, 1]
    advantages = prepared.arrays["advantages"].astype(np.float64).reshape(9, -1) + np.zeros((1, 2))
    wanted = rewards[:, None] - coef * charged - (0.3 if level == "rollout" else 0.0)
    np.testing.assert_allclose(advantages, wanted, rtol=1e-6, atol=1e-7)
    scores = slope(logp)  # [parameters, rollouts, tokens]
    estimate = np.einsum("prt,r,rt->p", scores, np.exp(logp(logits).sum(axis=1)), advantages)
    np.testing.assert_allclose(estimate, slope(objective_of), rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"divergence has shape None, expected \(9, 2\)"):
        objective.prepare(rewards, np.ones((9, 2), bool), groups=np.zeros(9, int))


def test_a_penalty_comes_before_other_shaping():
    penalty = ReferencePenalty.Config(coef=0.5, then=SoftOverlongPenalty.Config(max_length=10, buffer=4)).build()
    shaped = penalty(np.array([1.0, 1.0]), np.array([8, 2]), np.array([1.0, -1.0]))
    np.testing.assert_allclose(shaped, [1.0 - 0.5 - 0.5, 1.5])
