"""Placement of experts: replicas by load, the busiest device against the exact optimum, bad input, other plans."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.layers.moe.placement import (
    WHOLE,
    allocate,
    allocate_groups,
    balanced,
    largest_remainder,
    make_plan,
    overlapped,
    share_rows,
    slot_shares,
)
from mesh.errors import UserError


def zipf(experts: int, layers: int) -> np.ndarray:
    ranks = np.arange(1, experts + 1) ** -1.2
    return np.stack([np.random.default_rng(layer).permutation(ranks) for layer in range(layers)])


def least_busy(table: np.ndarray, load: np.ndarray) -> float:
    """The least load of the busiest device: of all sets of experts, the load over their devices (Hall)."""
    experts = range(len(load))
    sets = (some for size in range(1, len(load) + 1) for some in itertools.combinations(experts, size))
    return max(load[list(some)].sum() / len(np.nonzero(np.isin(table, some).any(axis=1))[0]) for some in sets)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_shares_make_the_busiest_device_as_idle_as_the_table_allows(devices, slots, data):
    experts = data.draw(st.integers(1, min(6, devices * slots)))
    loads = np.array([data.draw(st.lists(st.integers(0, 100), min_size=experts, max_size=experts))], float)
    plan = make_plan(loads, devices, slots)
    plan.check(1, experts, devices * slots)
    table = plan.experts[0].reshape(devices, slots)
    busiest = plan.device_loads(loads).max()
    assert busiest <= max(least_busy(table, loads[0]) * 1.02, loads.sum() / devices * 1.006) + 0.5
    assert np.isclose(plan.device_loads(loads).sum(), loads.sum())


def test_shares_of_an_expert_are_whole():
    loads = zipf(16, 3)
    plan = make_plan(loads, 8, 3)
    shares = slot_shares(plan.experts, plan.ends)
    for experts, parts in zip(plan.experts, shares, strict=True):
        assert np.bincount(experts, parts, minlength=16).tolist() == [WHOLE] * 16


@pytest.mark.parametrize("experts, devices, slots", [(128, 8, 17), (128, 16, 10), (128, 64, 4), (16, 4, 5), (8, 4, 3)])
def test_a_slot_or_two_more_balance_choices_by_zipfs_law(experts, devices, slots):
    loads = zipf(experts, 4)
    plan = make_plan(loads, devices, slots)
    drawn = np.stack([np.random.default_rng(9).multinomial(devices * 65536, load / load.sum()) for load in loads])
    uniform = loads.reshape(4, devices, -1).sum(axis=2)
    assert np.max(uniform.max(axis=1) / uniform.mean(axis=1)) > 1.8
    assert plan.busiest_to_mean(loads) <= 1.01
    assert plan.busiest_to_mean(drawn) <= 1.05


def test_the_same_counts_make_the_same_plan():
    loads = zipf(32, 2)
    one, other = (make_plan(loads.copy(), 8, 5) for _ in range(2))
    assert np.array_equal(one.experts, other.experts) and np.array_equal(one.ends, other.ends)


def test_layers_without_any_load_have_a_plan_too():
    plan = make_plan(np.zeros((2, 6)), 3, 3)
    plan.check(2, 6, 9)
    assert plan.busiest_to_mean(np.zeros((2, 6))) == 1


def test_fewer_slots_than_experts_are_refused():
    with pytest.raises(UserError, match=r"6 slots .* for 8 experts; expected 3 or more on each"):
        make_plan(np.ones((1, 8)), 3, 2)


def test_a_plan_of_another_model_is_refused():
    plan = make_plan(np.ones((2, 6)), 3, 3)
    with pytest.raises(UserError, match="2 layers and 9 slots; expected 3 layers and 9 slots"):
        plan.check(3, 6, 9)
    with pytest.raises(UserError, match="layer 0 has not the experts 0 to 6"):
        plan.check(2, 7, 9)


def test_a_table_is_shared_by_hand():
    table = np.array([[0, 1], [0, 2]])
    assert share_rows(table, np.array([6.0, 1.0, 3.0])).tolist() == [[2731, 4096], [4096, 4096]]  # 4 of 6 and 2


def test_a_thousand_hosts_are_planned_by_the_same_rule():
    make_plan(zipf(256, 1), 1024, 8).check(1, 256, 8192)


LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=12).map(np.array)


@settings(max_examples=150, deadline=None)
@given(LOADS, st.integers(1, 8), st.integers(1, 6))
def test_all_slots_are_used_and_popular_experts_have_no_fewer(loads, devices, slots):
    total = devices * slots
    if total < len(loads):
        return
    replicas = allocate(loads, total, devices)
    assert replicas.sum() == min(total, len(loads) * devices)
    assert replicas.min() >= 1 and replicas.max() <= devices
    assert np.all(np.diff(replicas[np.argsort(loads, kind="stable")]) >= 0)


@settings(max_examples=150, deadline=None)
@given(LOADS, st.integers(0, 5000))
def test_largest_remainders_have_the_sum_and_are_off_by_less_than_one(weights, total):
    found = largest_remainder(weights, total)
    fair = weights if weights.sum() else np.ones(len(weights))
    assert found.sum() == total
    assert np.all(np.abs(found - total * fair / fair.sum()) < 1)


def test_allocation_is_that_of_the_paper_by_hand():
    # 10 slots: 1/16 of 10 is 0, so 1; 2/15 of 9 is 1; 4/13 of 8 is 2; the rest to the last.
    assert allocate(np.array([1, 2, 4, 9]), 10, 10).tolist() == [1, 1, 2, 6]
    assert allocate(np.array([9, 4, 2, 1]), 10, 4).tolist() == [4, 4, 1, 1]  # what is above 4 devices goes to the next


def devices_of(table: np.ndarray, experts: int) -> list[int]:
    """The devices that have each expert, as bits."""
    return [sum(1 << int(device) for device in np.nonzero(np.any(table == e, axis=1))[0]) for e in range(experts)]


def survived(devices_of_experts: list[int], devices: int) -> list[int]:
    """The sets of lost devices, by how many they are, after which every expert is left."""
    found: list[int] = []
    for count in range(devices + 1):
        lost = (sum(1 << device for device in some) for some in itertools.combinations(range(devices), count))
        found.append(sum(all(held & ~gone for held in devices_of_experts) for gone in lost))
    return found


def best_survived(replicas: np.ndarray, devices: int, slots: int) -> list[int]:
    """The most for each number, of all placements of so many replicas, each on another device."""
    sets = [
        [sum(1 << d for d in some) for some in itertools.combinations(range(devices), int(count))] for count in replicas
    ]
    best = [0] * (devices + 1)
    for chosen in itertools.product(sets[0][:1], *sets[1:]):
        if all(sum(held >> device & 1 for held in chosen) <= slots for device in range(devices)):
            best = [max(pair) for pair in zip(best, survived(list(chosen), devices), strict=True)]
    return best


@pytest.mark.parametrize("devices, slots, experts", [(3, 2, 2), (4, 2, 4), (5, 2, 4), (4, 3, 3), (5, 1, 4), (6, 2, 4)])
@pytest.mark.parametrize("least", [1, 2])
def test_overlapping_survives_as_many_losses_as_any_placement(devices: int, slots: int, experts: int, least: int):
    if devices * slots < experts * least:
        return
    for seed in range(6):
        load = np.random.default_rng(seed).integers(0, 100, experts).astype(float)
        by_group = seed % 2 and -(-experts // slots) * least <= devices
        replicas = (
            allocate_groups(load, devices, slots, least)
            if by_group
            else allocate(load, devices * slots, devices, least)
        )
        assert replicas.min() >= least
        ours = survived(devices_of(overlapped(load, replicas, devices, slots), experts), devices)
        assert all(a >= b for a, b in zip(ours, best_survived(replicas, devices, slots), strict=True))
        spread = survived(devices_of(balanced(load, replicas, devices, slots), experts), devices)
        assert all(a >= b for a, b in zip(ours, spread, strict=True))


@settings(max_examples=200, deadline=None)
@given(LOADS, st.integers(1, 8), st.integers(1, 6), st.integers(1, 3))
def test_as_many_devices_have_an_expert_as_are_asked_for(loads, devices, slots, least):
    if devices * slots < len(loads) * least or least > devices:
        return
    table = overlapped(loads, allocate_groups(loads, devices, slots, least), devices, slots)
    held = [held.bit_count() for held in devices_of(table, len(loads))]
    assert min(held) >= least, table
    for row in table:
        filled = row[row >= 0].tolist()
        assert len(filled) == len(set(filled)), "an expert is twice on a device"
    assert share_rows(table, loads).max() == WHOLE


def test_groups_are_as_large_as_their_load_asks_for():
    load = np.array([41.0, 24, 9, 8, 7, 6, 4, 2])  # groups of two: 65, 17, 13, 6, on eight devices
    assert allocate_groups(load, 8, 2, 1).tolist() == [4, 4, 2, 2, 1, 1, 1, 1]
    assert allocate_groups(load, 8, 2, 2).tolist() == [2] * 8
    assert allocate_groups(load, 8, 4, 2).tolist() == [6, 6, 6, 6, 2, 2, 2, 2]  # 82 on six, 19 on two
