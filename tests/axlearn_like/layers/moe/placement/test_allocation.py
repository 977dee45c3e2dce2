"""Replicas by load: sums, order, thresholds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.layers.moe.placement.allocation import allocate, hold_threshold, largest_remainder

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=12).map(np.array)


@settings(max_examples=150, deadline=None)
@given(LOADS, st.integers(1, 8), st.integers(1, 6), st.integers(1, 5))
def test_all_slots_are_used_and_popular_experts_have_no_fewer(loads, domains, slots, asked):
    total = domains * slots
    if total < len(loads):
        return
    threshold = hold_threshold(asked, len(loads), total, domains)
    replicas = allocate(loads, total, domains, threshold)
    assert replicas.sum() == min(total, len(loads) * domains)
    assert replicas.min() >= threshold and replicas.max() <= domains
    assert np.all(np.diff(replicas[np.argsort(loads, kind="stable")]) >= 0)


def test_the_threshold_is_lowered_to_what_slots_and_domains_can_hold():
    assert hold_threshold(3, 8, 24, 5) == 3
    assert hold_threshold(3, 8, 23, 5) == 2
    assert hold_threshold(9, 2, 100, 4) == 4
    assert hold_threshold(0, 8, 24, 5) == 1


@settings(max_examples=150, deadline=None)
@given(LOADS, st.integers(0, 5000))
def test_largest_remainders_have_the_sum_and_are_off_by_less_than_one(weights, total):
    found = largest_remainder(weights, total)
    fair = weights if weights.sum() else np.ones(len(weights))
    assert found.sum() == total
    assert np.all(np.abs(found - total * fair / fair.sum()) < 1)


def test_allocation_is_that_of_the_paper_by_hand():
    # 10 slots: 1/16 of 10 is 0, so the threshold of 1; 2/15 of 9 is 1; 4/13 of 8 is 2; the rest to the last.
    assert allocate(np.array([1, 2, 4, 9]), 10, 10).tolist() == [1, 1, 2, 6]
    assert allocate(np.array([9, 4, 2, 1]), 10, 4).tolist() == [4, 4, 1, 1]  # what is above 4 devices goes to the next
