"""Generalised advantages against the sums that define them, by loops in float64."""

from typing import Any

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from mesh.errors import UserError
from rl.objective import GeneralisedAdvantage, Objective, ReferencePenalty, RewardToGo
from rl.objective.gae import at_last_token
from rl.objective.presets import grpo, ppo, reinforce_pp
from rl.objective.rollouts import PerToken
from rl.training.critic import Critic
from tests.rl.tiny import tiny_experiment

pytestmark = pytest.mark.numerics

RNG = np.random.default_rng(3)
LENGTH = 7
MASK = np.zeros((5, LENGTH), bool)
for row, size in enumerate((7, 1, 4, 5, 3)):
    MASK[row, :size] = True
MASK[3, 2] = False  # a token of a tool, between two that were sampled
VALUES = RNG.normal(size=MASK.shape)
REWARDS = RNG.normal(size=5)
LIVE = np.array([True, True, True, True, False])


def config(**fields: Any) -> GeneralisedAdvantage:
    critic = Critic.Config(learner=tiny_experiment().learner)  # of no use here
    built = GeneralisedAdvantage.Config(critic=critic, **fields).build()
    assert isinstance(built, GeneralisedAdvantage)
    return built


def expected(row: int, gamma: float, lam: float) -> dict[int, float]:
    """A_t = sum_k (gamma lam)^k delta_{t+k} over the sampled tokens of a rollout."""
    steps = np.flatnonzero(MASK[row])
    values = [*VALUES[row, steps], 0.0]
    rewards = [0.0] * (len(steps) - 1) + [REWARDS[row]]
    deltas = [rewards[i] + gamma * values[i + 1] - values[i] for i in range(len(steps))]
    return {int(t): sum((gamma * lam) ** k * deltas[i + k] for k in range(len(steps) - i)) for i, t in enumerate(steps)}


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_it_is_the_sum_of_discounted_differences(gamma: float, lam: float) -> None:
    found = config(gamma=gamma, lam=lam, whiten=False).of_values(at_last_token(REWARDS, MASK), VALUES, MASK, LIVE)
    for row in range(5):
        exact = expected(row, gamma, lam) if LIVE[row] else {}
        for t in range(LENGTH):
            assert found.advantages[row, t] == pytest.approx(exact.get(t, 0.0), abs=1e-12)
            assert found.returns[row, t] == pytest.approx(exact[t] + VALUES[row, t] if t in exact else 0.0, abs=1e-12)
    if (gamma, lam) == (1.0, 1.0):  # reward less value, whatever comes between
        rewards = np.broadcast_to(REWARDS[:, None], MASK.shape)
        np.testing.assert_allclose(found.returns[LIVE], np.where(MASK, rewards, 0.0)[LIVE], atol=1e-12)


def test_whitening_is_over_sampled_tokens_and_makes_no_signal_of_none() -> None:
    found = config().of_values(at_last_token(REWARDS, MASK), VALUES, MASK, LIVE).advantages
    live = found[MASK & LIVE[:, None]]
    assert live.mean() == pytest.approx(0.0, abs=1e-12) and live.std() == pytest.approx(1.0)
    assert not found[~(MASK & LIVE[:, None])].any()
    first = MASK & (np.arange(LENGTH) < 1)
    flat = config().of_values(at_last_token(np.full(5, 0.3), first), np.full(MASK.shape, 0.1), first, LIVE)
    assert not flat.advantages.any()


def test_the_critic_may_look_further_than_the_policy_and_lambda_may_grow_with_length() -> None:
    """VC-PPO: targets with lambda 1 are the rewards. VAPO: lambda = 1 - 1 / (alpha length)."""
    found = config(lam=0.5, critic_lam=1.0, whiten=False).of_values(at_last_token(REWARDS, MASK), VALUES, MASK, LIVE)
    for row in np.flatnonzero(LIVE).tolist():
        exact = expected(row, 1.0, 0.5)
        assert all(found.advantages[row, t] == pytest.approx(a) for t, a in exact.items())
        assert all(found.returns[row, t] == pytest.approx(REWARDS[row]) for t in exact)
    found = config(length_adaptive=0.5, critic_lam=1.0, whiten=False).of_values(
        at_last_token(REWARDS, MASK), VALUES, MASK, LIVE
    )
    for row in np.flatnonzero(LIVE).tolist():
        exact = expected(row, 1.0, max(1 - 1 / (0.5 * MASK[row].sum()), 0.0))
        assert all(found.advantages[row, t] == pytest.approx(a) for t, a in exact.items())


def test_an_objective_needs_the_values_of_every_token() -> None:
    objective = ppo(Critic.Config(learner=tiny_experiment().learner)).build()
    assert objective.needs_values
    prepared = objective.prepare(REWARDS, MASK, groups=np.arange(5), per_token=PerToken(values=VALUES), scored=LIVE)
    assert prepared.arrays["advantages"].shape == MASK.shape and prepared.returns is not None
    with pytest.raises(ValueError, match="values has shape None"):
        objective.prepare(REWARDS, MASK, groups=np.arange(5))
    with pytest.raises(ConfigError, match="lam: expected a number from 0 to 1"):
        ppo(Critic.Config(learner=tiny_experiment().learner), lam=1.5).check()


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reward_to_go_is_what_comes_from_a_token_on(gamma: float) -> None:
    """Loops over the sampled tokens give the same, with a reward for each; what a tool wrote is skipped."""
    rewards = np.where(MASK, RNG.normal(size=MASK.shape), np.nan)
    advantage = RewardToGo.Config(gamma=gamma, whiten=False).build()
    assert isinstance(advantage, RewardToGo)
    found = advantage.of_values(rewards, np.zeros(MASK.shape), MASK, LIVE)
    for row in range(5):
        steps = np.flatnonzero(MASK[row]).tolist() if LIVE[row] else []
        for k, t in enumerate(steps):
            wanted = sum(gamma ** (later - k) * rewards[row, steps[later]] for later in range(k, len(steps)))
            assert found.advantages[row, t] == pytest.approx(wanted, abs=1e-12)
        assert not np.delete(found.advantages[row], steps).any()


def test_a_penalty_by_token_needs_an_advantage_of_tokens_and_a_divergence() -> None:
    penalty = ReferencePenalty.Config(coef=0.1, level="token")
    with pytest.raises(ConfigError, match=r"reward_shaping\.level: expected 'rollout': GroupAdvantage .*RewardToGo"):
        grpo().set(reward_shaping=penalty).check()
    with pytest.raises(UserError, match="reward_kl needs group_baseline=False"):
        reinforce_pp(group_baseline=True, reward_kl=0.1)
    assert (
        reinforce_pp().reward_shaping is None
        and ppo(Critic.Config(learner=tiny_experiment().learner)).reward_shaping is None
    )
    objective: Objective = reinforce_pp(reward_kl=0.1).build()
    with pytest.raises(ValueError, match=r"divergence has shape \(5,\), expected \(5, 7\), that of action_mask"):
        objective.prepare(REWARDS, MASK, groups=np.arange(5), per_token=PerToken(np.zeros(5)))
