"""Advantages against loops over groups, and the edge cases that libraries get wrong."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import UserError
from rl.objective import (
    BatchAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    NodeAdvantage,
    Objective,
    OptimalBaselineAdvantage,
    RawReward,
    SuccessNormalisedAdvantage,
    TurnAdvantage,
)

CONFIGS = {
    "grpo": GroupAdvantage.Config(ddof=0, eps=1e-4),
    "grpo-ddof1": GroupAdvantage.Config(ddof=1, eps=1e-4),
    "centred": GroupAdvantage.Config(normalise_std=False),
    "leave-one-out": LeaveOneOutAdvantage.Config(),
    "maxrl": SuccessNormalisedAdvantage.Config(),
    "batch": BatchAdvantage.Config(centre="batch", ddof=1, eps=1e-4),
    "batch-group": BatchAdvantage.Config(centre="group", eps=1e-4),
    "raw": RawReward.Config(baseline=0.25),
}
GROUP_RELATIVE = ["grpo", "grpo-ddof1", "centred", "leave-one-out", "maxrl", "batch-group"]


def random_batch(seed: int):
    """Uneven groups of at least two live rollouts each, some dead ones among them."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(3), [3, 4, 5])
    live = rng.random(12) < 0.7
    for g in range(3):
        live[np.flatnonzero(groups == g)[:2]] = True
    rewards = rng.integers(0, 3, size=12) / 2.0
    order = rng.permutation(12)
    return rewards[order], groups[order], live[order]


def by_loops(name: str, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
    alive = [i for i in range(len(rewards)) if live[i]]

    def group_mean(i: int) -> float:
        mates = [rewards[j] for j in alive if groups[j] == groups[i]]
        return sum(mates) / len(mates)

    out = np.zeros(len(rewards))
    for i in alive:
        mates = [rewards[j] for j in alive if groups[j] == groups[i]]
        centred = rewards[i] - group_mean(i)
        squares = sum((r - group_mean(i)) ** 2 for r in mates)
        if name == "grpo":
            out[i] = centred / (math.sqrt(squares / len(mates)) + 1e-4)
        elif name == "grpo-ddof1":
            out[i] = centred / (math.sqrt(squares / (len(mates) - 1)) + 1e-4)
        elif name == "centred":
            out[i] = centred
        elif name == "leave-one-out":
            others = [rewards[j] for j in alive if groups[j] == groups[i] and j != i]
            out[i] = rewards[i] - sum(others) / len(others)
        elif name == "maxrl":
            out[i] = centred / group_mean(i) if group_mean(i) > 0 else 0.0
        elif name == "batch":
            mean = sum(rewards[j] for j in alive) / len(alive)
            variance = sum((rewards[j] - mean) ** 2 for j in alive) / (len(alive) - 1)
            out[i] = (rewards[i] - mean) / (math.sqrt(variance) + 1e-4)
        elif name == "batch-group":
            variance = sum((rewards[j] - group_mean(j)) ** 2 for j in alive) / len(alive)
            out[i] = centred / (math.sqrt(variance) + 1e-4)
        elif name == "raw":
            out[i] = rewards[i] - 0.25
    return out


@pytest.mark.numerics
@pytest.mark.parametrize("name", CONFIGS)
@given(seed=st.integers(0, 10_000))
def test_equals_the_formula(name, seed):
    rewards, groups, live = random_batch(seed)
    got = CONFIGS[name].build()(rewards, groups, live)
    np.testing.assert_allclose(got, by_loops(name, rewards, groups, live), atol=1e-12)


@pytest.mark.numerics
@pytest.mark.parametrize("name", CONFIGS)
def test_order_of_rollouts_does_not_matter(name):
    rewards, groups, live = random_batch(1)
    order = np.random.default_rng(0).permutation(12)
    advantage = CONFIGS[name].build()
    np.testing.assert_allclose(
        advantage(rewards[order], groups[order], live[order]),
        advantage(rewards, groups, live)[order],
        atol=1e-12,
    )


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_constant_group_is_exactly_zero(name):
    """Three times 0.1 has a float mean that is not 0.1; the residue must not become a signal."""
    rewards = np.array([0.1, 0.1, 0.1, 0.0, 1.0])
    assert rewards[:3].mean() != rewards[0]
    got = CONFIGS[name].build()(rewards, np.array([0, 0, 0, 1, 1]), np.ones(5, bool))
    assert (got[:3] == 0.0).all() and got[4] > 0 > got[3]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_dead_neither_receive_nor_influence(name):
    rewards, groups, live = random_batch(2)
    assert not live.all()
    changed = np.where(live, rewards, 77.0)
    advantage = CONFIGS[name].build()
    got = advantage(changed, groups, live)
    np.testing.assert_array_equal(got, advantage(rewards, groups, live))
    assert not got[~live].any()


def test_maxrl_of_one_success_in_four():
    got = CONFIGS["maxrl"].build()(np.array([1.0, 0, 0, 0]), np.zeros(4, int), np.ones(4, bool))
    np.testing.assert_array_equal(got, [3, -1, -1, -1])


def test_maxrl_refuses_negative_rewards_of_live_rollouts():
    rewards = np.array([1.0, -0.5])
    with pytest.raises(UserError, match=r"rewards of 0 or more.*got -0.5; expected .*GroupAdvantage"):
        CONFIGS["maxrl"].build()(rewards, np.zeros(2, int), np.ones(2, bool))


@pytest.mark.numerics
def test_batch_statistics_are_those_left_after_filtering():
    """A group that the filter dropped must not shrink the deviation of the rest."""
    rewards = np.array([0.0, 1.0, 1.0, 1.0])
    groups = np.array([0, 0, 1, 1])
    advantage = BatchAdvantage.Config(centre="group", eps=0.0).build()
    kept = advantage(rewards, groups, np.array([True, True, False, False]))
    np.testing.assert_allclose(kept, [-1, 1, 0, 0])
    everything = advantage(rewards, groups, np.ones(4, bool))
    np.testing.assert_allclose(everything, np.array([-1, 1, 0, 0]) * math.sqrt(2))


def test_which_need_groups():
    assert GroupAdvantage.Config().build().min_group_size == 2
    batch, by_group = CONFIGS["batch"].build(), CONFIGS["batch-group"].build()
    assert (batch.min_group_size, batch.group_relative) == (1, False)
    assert (by_group.min_group_size, by_group.group_relative) == (2, True)
    assert RawReward.Config().build().min_group_size == 1


@pytest.mark.parametrize("cls", [GroupAdvantage, BatchAdvantage])
def test_ddof_is_checked(cls):
    with pytest.raises(UserError, match=rf"{cls.__name__}.ddof: expected 0 or 1, got 2"):
        cls.Config(ddof=2).build()


def test_a_turn_is_credited_with_what_comes_from_it_on():
    rewards, groups, live = np.array([3.0, 1.0, 2.0, 9.0]), np.zeros(4, int), np.array([True, True, True, False])
    turns = [[(2, 1.0), (5, 0.0), (6, 0.0)], [(3, 1.0), (4, 0.0)], [], [(1, 9.0)]]
    found = (
        TurnAdvantage.Config(advantage=GroupAdvantage.Config(normalise_std=False))
        .build()
        .of_tokens(rewards, groups, live, turns, 8)
    )
    # Returns of the first turn 3, 1, 2; of the second 2 and 0, of two; of the third one alone.
    expected = [[1, 1, 1, 1, 1, 0, 0, 0], [-1, -1, -1, -1, -1, -1, -1, -1], [0] * 8, [0] * 8]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_with_one_turn_each_credit_by_turn_is_credit_by_episode(name: str):
    rewards, groups, live = random_batch(1)
    turns = [[(3, float(reward))] for reward in rewards]
    found = TurnAdvantage.Config(advantage=CONFIGS[name]).build().of_tokens(rewards, groups, live, turns, 4)
    plain = CONFIGS[name].build()(rewards, groups, live)
    np.testing.assert_array_equal(found, np.repeat(plain[:, None], 4, axis=1))


@pytest.mark.numerics
def test_equal_sums_of_different_turns_have_a_gradient():
    rewards, mask = np.array([[1.0, 1.0], [1.0, 1.0]]), np.ones((2, 2, 4), bool)
    mask[..., 1] = False  # an observation
    turns = [[(1, 1.0), (4, 0.0)], [(1, 0.0), (4, 1.0)], [(4, 1.0)], [(4, 1.0)]]
    cfg = Objective.Config(advantage=TurnAdvantage.Config(), zero_variance="drop")
    prepared = cfg.build().prepare(rewards, mask, turns=turns)
    np.testing.assert_allclose(prepared.arrays["advantages"][0], [[0, 0, -1, -1], [0, 0, 1, 1]], atol=1e-5)
    assert not prepared.arrays["weights"][1].any() and prepared.stats["zero_variance_fraction"] == 0.5
    assert not cfg.set(advantage=GroupAdvantage.Config()).build().prepare(rewards, mask).arrays["weights"].any()


@pytest.mark.numerics
def test_the_optimal_baseline_weighs_rewards_by_length_and_leaves_equal_ones_at_zero():
    rewards, groups = np.array([1.0, 0.0, 99.0, 0.7, 0.7]), np.array([0, 0, 0, 1, 1])
    live, lengths = np.array([True, True, False, True, True]), np.array([3, 9, 50, 3, 7])
    advantage = OptimalBaselineAdvantage.Config().build()
    np.testing.assert_allclose(advantage.of_rollouts(rewards, groups, live, lengths), [0.75, -0.25, 0, 0, 0])
    found = (
        Objective.Config(advantage=OptimalBaselineAdvantage.Config())
        .build()
        .prepare(np.array([[1.0, 0.0]]), np.array([[[1, 1, 1, 0], [1, 0, 0, 0]]], bool))
    )
    np.testing.assert_allclose(found.arrays["advantages"], [[0.25, -0.75]])


def test_credit_by_turn_refuses_advantages_of_more_than_rewards():
    with pytest.raises(UserError, match=r"advantage: expected one of rewards alone.*not OptimalBaselineAdvantage"):
        TurnAdvantage.Config(advantage=OptimalBaselineAdvantage.Config()).build()


def test_a_plan_has_the_shaped_reward_of_its_sample_and_nodes_have_their_own():
    advantage = NodeAdvantage.Config(advantage=GroupAdvantage.Config(normalise_std=False)).build()
    turns = [[(2, 9.0), (3, 1.0)], [(1, 9.0), (3, 0.5)]]  # end and reward of the sample itself, then of its node
    found = advantage.of_tokens(np.array([1.0, 0.0]), np.zeros(2, int), np.ones(2, bool), turns, 3)
    np.testing.assert_array_equal(found, [[0.5, 0.5, 0.25], [-0.5, -0.25, -0.25]])
