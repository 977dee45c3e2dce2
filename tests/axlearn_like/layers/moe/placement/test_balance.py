"""Balance of devices: the busiest against the exact optimum, bad input, other models' plans."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.layers.moe.placement.balance import make_plan, share_rows
from axlearn_like.layers.moe.placement.plan import WHOLE, Domains, slot_shares
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
    plan = make_plan(loads, Domains(devices, 1, slots))
    plan.check(1, experts, devices * slots)
    table = plan.experts[0].reshape(devices, slots)
    busiest = plan.device_loads(loads).max()
    assert busiest <= max(least_busy(table, loads[0]) * 1.02, loads.sum() / devices * 1.006) + 0.5
    assert np.isclose(plan.device_loads(loads).sum(), loads.sum())


def test_shares_of_an_expert_are_whole():
    loads = zipf(16, 3)
    plan = make_plan(loads, Domains(4, 2, 3), 2)
    shares = slot_shares(plan.experts, plan.ends)
    for experts, parts in zip(plan.experts, shares, strict=True):
        assert np.bincount(experts, parts, minlength=16).tolist() == [WHOLE] * 16


@pytest.mark.parametrize("experts, devices, slots", [(128, 8, 17), (128, 16, 10), (128, 64, 4), (16, 4, 5), (8, 4, 3)])
def test_a_slot_or_two_more_balance_choices_by_zipfs_law(experts, devices, slots):
    loads = zipf(experts, 4)
    plan = make_plan(loads, Domains(devices, 1, slots))
    drawn = np.stack([np.random.default_rng(9).multinomial(devices * 65536, load / load.sum()) for load in loads])
    uniform = loads.reshape(4, devices, -1).sum(axis=2)
    assert np.max(uniform.max(axis=1) / uniform.mean(axis=1)) > 1.8
    assert plan.busiest_to_mean(loads) <= 1.01
    assert plan.busiest_to_mean(drawn) <= 1.05


def test_every_expert_is_in_as_many_domains_as_asked_for_or_said():
    loads = zipf(8, 2)
    for asked, held in ((2, 2), (3, 3), (9, 3)):
        plan = make_plan(loads, Domains(4, 2, 3), asked)
        assert plan.threshold == held
        for row in plan.experts.reshape(2, 4, 6):
            assert min(np.sum(np.any(row == expert, axis=1)) for expert in range(8)) >= held


def test_the_same_counts_make_the_same_plan():
    loads = zipf(32, 2)
    one, other = (make_plan(loads.copy(), Domains(8, 1, 5)) for _ in range(2))
    assert np.array_equal(one.experts, other.experts) and np.array_equal(one.ends, other.ends)


def test_layers_without_any_load_have_a_plan_too():
    plan = make_plan(np.zeros((2, 6)), Domains(3, 1, 3))
    plan.check(2, 6, 9)
    assert plan.busiest_to_mean(np.zeros((2, 6))) == 1


def test_fewer_slots_than_experts_are_refused():
    with pytest.raises(UserError, match=r"6 slots .* for 8 experts; expected 3 or more on each"):
        make_plan(np.ones((1, 8)), Domains(3, 1, 2))


def test_a_plan_of_another_model_is_refused():
    plan = make_plan(np.ones((2, 6)), Domains(3, 1, 3))
    with pytest.raises(UserError, match="2 layers and 9 slots; expected 3 layers and 9 slots"):
        plan.check(3, 6, 9)
    with pytest.raises(UserError, match="layer 0 has not the experts 0 to 6"):
        plan.check(2, 7, 9)


def test_a_table_is_shared_by_hand():
    table = np.array([[0, 1], [0, 2]])
    assert share_rows(table, np.array([6.0, 1.0, 3.0])).tolist() == [[2731, 4096], [4096, 4096]]  # 4 of 6 and 2


def test_a_thousand_hosts_are_planned_by_the_same_rule():
    for threshold in (1, 2):
        plan = make_plan(zipf(256, 1), Domains(1024, 4, 2), threshold)
        plan.check(1, 256, 8192)
