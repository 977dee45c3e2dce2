"""Aggregation weights against loops written from the formulas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import UserError
from rl.objective import MaxLengthMean, PromptMean, SequenceMean, SequenceSum, TokenMean

pytestmark = pytest.mark.numerics

NORMALISED = [TokenMean, SequenceMean, PromptMean]
ALL = [*NORMALISED, SequenceSum, MaxLengthMean]


def build(cls):
    return (cls.Config(max_length=9) if cls is MaxLengthMean else cls.Config()).build()


def random_mask(seed: int, rollouts: int = 7, length: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Ragged rows with holes (tool tokens), some rows empty, groups of uneven size."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, length + 1, size=rollouts)
    mask = np.arange(length) < lengths[:, None]
    mask &= rng.random(mask.shape) < 0.8
    return mask, rng.integers(0, 3, size=rollouts)


def by_loops(cls, mask: np.ndarray, groups: np.ndarray) -> np.ndarray:
    rollouts, length = mask.shape
    counts = [sum(bool(mask[i, t]) for t in range(length)) for i in range(rollouts)]
    live = [i for i in range(rollouts) if counts[i] > 0]
    weights = np.zeros((rollouts, length))
    for i in live:
        mates = [j for j in live if groups[j] == groups[i]]
        prompts = len({groups[j] for j in live})
        divisor = {
            TokenMean: sum(counts),
            SequenceMean: counts[i] * len(mates) * prompts,
            PromptMean: sum(counts[j] for j in mates) * prompts,
            SequenceSum: len(mates) * prompts,
            MaxLengthMean: len(mates) * prompts * 9,
        }[cls]
        for t in range(length):
            if mask[i, t]:
                weights[i, t] = 1.0 / divisor
    return weights


@pytest.mark.parametrize("cls", ALL)
@given(seed=st.integers(0, 10_000))
def test_equals_the_formula(cls, seed):
    mask, groups = random_mask(seed)
    np.testing.assert_allclose(build(cls)(mask, groups), by_loops(cls, mask, groups), rtol=1e-12)


@pytest.mark.parametrize("cls", NORMALISED)
def test_means_sum_to_one(cls):
    mask, groups = random_mask(3)
    assert build(cls)(mask, groups).sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("cls", ALL)
def test_empty_rows_and_padding_change_nothing(cls):
    mask, groups = random_mask(5)
    padded = np.pad(mask, ((0, 2), (0, 3)))  # two dropped rollouts, three padded positions
    padded_groups = np.append(groups, [0, 7])  # one of them in a group of its own
    got = build(cls)(padded, padded_groups)
    np.testing.assert_array_equal(got[:-2, :-3], build(cls)(mask, groups))
    assert not got[-2:].any() and not got[:, -3:].any()


@pytest.mark.parametrize("cls", ALL)
def test_batch_without_tokens_is_zero_not_nan(cls):
    weights = build(cls)(np.zeros((3, 4), bool), np.array([0, 0, 1]))
    assert weights.shape == (3, 4) and not weights.any()


def test_where_the_aggregations_differ():
    """Two prompts; lengths (1, 3) and (4, 4): the share of the one-token rollout by hand."""
    mask = np.arange(4) < np.array([1, 3, 4, 4])[:, None]
    groups = np.array([0, 0, 1, 1])
    share = {cls: build(cls)(mask, groups)[0, 0] for cls in ALL}
    assert share[TokenMean] == pytest.approx(1 / 12)
    assert share[SequenceMean] == pytest.approx(1 / 4)
    assert share[PromptMean] == pytest.approx(1 / 4 / 2)
    assert share[SequenceSum] == pytest.approx(1 / 4)
    assert share[MaxLengthMean] == pytest.approx(1 / (4 * 9))


def test_max_length_is_checked():
    with pytest.raises(UserError, match="MaxLengthMean.max_length: expected 1 or more, got 0"):
        MaxLengthMean.Config(max_length=0).build()
    with pytest.raises(UserError, match=r"4 sampled tokens exceeds .*max_length=3"):
        MaxLengthMean.Config(max_length=3).build()(np.ones((2, 4), bool), np.zeros(2, int))
