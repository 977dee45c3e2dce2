"""Placement that survives failures, by enumeration of all failures and of all placements."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.layers.moe.placement.allocation import allocate, hold_threshold
from axlearn_like.layers.moe.placement.survival import losing_sets, max_rank_overlap, place_to_survive, spread


def compact(replicas: Any, domains: int, slots: int) -> Any:
    return np.resize(np.repeat(np.arange(len(replicas)), replicas), (domains, slots))


def survived(table: Any, experts: int, failures: int) -> float:
    """The share of the sets of failed domains after which every expert is left."""
    domains = range(len(table))
    left = [
        {int(e) for d in domains if d not in dead for e in table[d] if e >= 0}
        for dead in itertools.combinations(domains, failures)
    ]
    return sum(len(some) == experts for some in left) / len(left)


def best(replicas: Any, domains: int, slots: int, failures: int) -> float:
    """The best of all placements with so many copies on different domains."""
    options = [list(itertools.combinations(range(domains), int(count))) for count in replicas]
    dead = [set(some) for some in itertools.combinations(range(domains), failures)]
    found = 0
    for picked in itertools.product(*options):
        if max(sum(domain in on for on in picked) for domain in range(domains)) <= slots:
            found = max(found, sum(all(not some.issuperset(on) for on in picked) for some in dead))
    return found / math.comb(domains, failures)


def replicas_of(loads: Any, domains: int, slots: int, asked: int) -> Any:
    total = domains * slots
    return allocate(loads, total, domains, hold_threshold(asked, len(loads), total, domains))


CASES = st.tuples(st.integers(2, 7), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.data())


@settings(max_examples=100, deadline=None)
@given(CASES)
def test_whole_groups_never_survive_less_often_than_spread_or_compact(case):
    domains, slots, groups, asked, data = case
    experts = slots * groups
    if groups > domains:
        return
    loads = np.array(data.draw(st.lists(st.integers(1, 400), min_size=experts, max_size=experts)))
    replicas = replicas_of(loads, domains, slots, asked)
    found = place_to_survive(replicas, domains, slots)
    assert np.all(np.bincount(found.reshape(-1), minlength=experts) >= replicas.clip(max=1))
    for failures in range(domains):
        others = [rule(replicas, domains, slots) for rule in (spread, compact)]
        assert survived(found, experts, failures) >= max(survived(o, experts, failures) for o in others) - 1e-12


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 7), st.integers(2, 4), st.integers(1, 8), st.integers(1, 4), st.data())
def test_others_never_lose_more_often_at_the_first_number_of_failures_that_can_lose_one(
    domains, slots, experts, asked, data
):
    if experts > domains * slots:
        return
    loads = np.array(data.draw(st.lists(st.integers(1, 400), min_size=experts, max_size=experts)))
    replicas = replicas_of(loads, domains, slots, asked)
    tables = [rule(replicas, domains, slots) for rule in (place_to_survive, spread, compact)]
    for failures in range(domains):
        found, *others = (survived(table, experts, failures) for table in tables)
        assert found >= max(others) - 1e-12
        if found < 1:
            return


@pytest.mark.parametrize("domains, slots, experts, asked", [(4, 2, 4, 2), (5, 2, 4, 2), (5, 3, 3, 2), (4, 1, 3, 1)])
def test_whole_groups_are_optimal(domains, slots, experts, asked):
    for seed in range(3):
        replicas = replicas_of(np.random.default_rng(seed).integers(1, 30, experts), domains, slots, asked)
        table = place_to_survive(replicas, domains, slots)
        for failures in range(domains):
            assert survived(table, experts, failures) >= best(replicas, domains, slots, failures) - 1e-12


def test_a_group_that_is_not_whole_is_spread_where_that_loses_less():
    """Three experts twice on three domains of two: overlap has all copies of one on one domain, spread on two."""
    replicas = np.array([2, 2, 2])
    assert survived(max_rank_overlap(replicas, 3, 2), 3, 1) < 1
    assert survived(place_to_survive(replicas, 3, 2), 3, 1) == 1 == best(replicas, 3, 2, 1)


def test_losing_sets_are_counted_by_size():
    assert losing_sets(np.array([[0, 1], [0, 1], [2, -1]]), 3) == (0, 1, 1, 0)
    assert losing_sets(np.array([[0, -1], [0, 1]]), 2) == (0, 1, 1)
