"""Shuffles are permutations without a pattern, and stay what they are: a resumed run must not meet another order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.input.shuffle import derived_seed, shuffled


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_every_index_comes_once(length, seed):
    np.testing.assert_array_equal(np.sort(shuffled(np.arange(length), length, seed)), np.arange(length))


@pytest.mark.parametrize("length", [2**16, 2**16 + 1])
def test_also_at_the_edge_of_a_block(length):
    assert len(np.unique(shuffled(np.arange(length), length, 3))) == length


def test_a_place_alone_is_the_place_among_others():
    order = shuffled(np.arange(1000), 1000, 5)
    assert shuffled(np.array([7, 999, 0]), 1000, 5).tolist() == order[[7, 999, 0]].tolist()
    far = shuffled(np.arange(10**12, 10**12 + 50), 10**13, 5)
    assert len(set(far.tolist())) == 50 and far.max() < 10**13


@pytest.mark.parametrize("length", [5, 1000])
def test_each_place_gets_every_index_about_equally_often(length):
    seeds = 1000
    for place in (0, length // 2, length - 1):
        found = np.concatenate([shuffled(np.array([place]), length, seed) for seed in range(seeds)])
        bins = np.bincount(found * 5 // length, minlength=5)
        chi2 = (
            (bins - (expected := np.bincount(np.arange(length) * 5 // length) * seeds / length)) ** 2 / expected
        ).sum()
        assert chi2 < 25  # 4 degrees of freedom: p = 5e-5


def test_neighbours_are_parted():
    order = shuffled(np.arange(10_000), 10_000, 11)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04
    assert abs(np.corrcoef(order, shuffled(np.arange(10_000), 10_000, 12))[0, 1]) < 0.04


def test_the_orders_are_those_of_earlier_versions():
    seed = derived_seed(0, "rows", 7)
    assert seed == 3496256958901127467
    assert shuffled(np.arange(8), 8, seed).tolist() == [1, 4, 7, 6, 5, 0, 2, 3]
    assert shuffled(np.arange(4), 100_000, seed).tolist() == [73985, 22792, 42831, 18814]
