"""Attention and experts on two groups: the best order of all, bounds, and experts that move, by brute force."""

import itertools

import pytest

from mesh.cost.schedules import Op, makespan
from mesh.cost.zebra import (
    DeviceGroups,
    ZebraShape,
    asymmetric_ratio,
    break_even_bandwidth,
    in_turn,
    squeeze,
    zebra_orders,
    zebra_ratio,
)
from mesh.errors import UserError


def best(orders: dict[str, list[Op]]) -> float:
    """The least makespan of all orders on the two groups, by search; links take what is ready first."""
    ops = {op.name: (resource, op) for resource, some in orders.items() for op in some}
    found = [makespan(orders)]

    def go(done: dict, free: dict[str, float]) -> None:
        if max(free.values()) >= found[0]:
            return
        if len(done) == len(ops):
            found[0] = max(free.values())
            return
        ready = [
            (max([free[resource], *(done[a] for a in op.after)]), resource, op)
            for resource, op in ops.values()
            if op.name not in done and all(a in done for a in op.after)
        ]
        # Active schedules hold an optimum: of the resource that could end an operation first, one that begins by then.
        end, first, _ = min((begin + op.seconds, resource, op.name) for begin, resource, op in ready)
        for begin, resource, op in ready:
            if resource == first and (begin < end or op.seconds == 0):
                go({**done, op.name: begin + op.seconds}, {**free, resource: begin + op.seconds})

    go({}, dict.fromkeys(orders, 0.0))
    return found[0]


SHAPES = [
    ZebraShape(layers, batches, attention, experts, transfer, head=attention)
    for layers, batches in ((1, 2), (2, 2), (1, 3))
    for attention, experts in ((1.0, 1.0), (3.0, 4.0), (4.0, 3.0))
    for transfer in (0.0, 0.5)
]


@pytest.mark.parametrize("shape", SHAPES)
def test_no_other_order_ends_earlier(shape: ZebraShape):
    assert makespan(zebra_orders(shape)) == pytest.approx(best(zebra_orders(shape)))


def test_without_a_head_others_may_end_a_little_earlier_where_attention_is_slower():
    orders = zebra_orders(ZebraShape(1, 2, 4.0, 3.0))
    assert (makespan(orders), best(orders)) == (33, 32)


def test_ratios_are_below_two_and_near_it_for_equal_groups():
    assert 1.9 < zebra_ratio(ZebraShape(12, 4, 1.0, 1.0)) < 2
    assert zebra_ratio(ZebraShape(12, 1, 1.0, 1.0)) == pytest.approx(1)
    three_to_four = ZebraShape(48, 4, 3.0, 4.0)
    assert zebra_ratio(three_to_four) == pytest.approx(1.74, abs=0.01)
    orders = zebra_orders(three_to_four)
    busy = sum(op.seconds for op in orders["attention"]) / makespan(orders)
    assert busy == pytest.approx(0.75, abs=0.01)  # the paper's 75 %


def test_without_overlap_everything_is_in_turn():
    shape = ZebraShape(2, 3, 1.0, 2.0, 0.25, 2.0, 0.5)
    ops = [op for some in zebra_orders(shape).values() for op in some]
    assert in_turn(shape) == pytest.approx(sum(op.seconds for op in ops))


def test_below_the_break_even_bandwidth_the_link_decides():
    shape = ZebraShape(24, 8, 1.0, 1.0, backward=1.0)
    bandwidth = break_even_bandwidth(shape, 8.0)
    fast, slow = (makespan(zebra_orders(shape._replace(transfer=8.0 / (f * bandwidth)))) for f in (1.25, 0.5))
    nothing = makespan(zebra_orders(shape))
    assert fast < 1.1 * nothing and slow > 1.8 * nothing


GROUPS = [
    DeviceGroups(4, 4, 32, 0.25, 0.5, 10**9),
    DeviceGroups(2, 4, 16, 0.3, 1.0, 10**9),
    DeviceGroups(4, 2, 16, 0.2, 0.4, 10**9),
]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("attention", [1.0, 2.0, 3.0])
def test_moved_experts_bring_both_groups_as_near_as_any_number_of_them(groups: DeviceGroups, attention: float):
    """Try all numbers of chunks in three layers: none has a smaller time of the slower group."""
    layers, chunk = 3, max(groups.attention, groups.experts)
    whole = groups.num_experts / groups.experts * groups.expert_on_experts
    found = squeeze(layers, attention, groups)
    times = []
    for counts in itertools.product(range(groups.num_experts // chunk + 1), repeat=layers):
        mean = sum(counts) * chunk / layers
        to = attention + mean / groups.attention * groups.expert_on_attention
        times.append(max(to, whole - mean / groups.experts * groups.expert_on_experts))
    step = (groups.expert_on_attention / groups.attention + groups.expert_on_experts / groups.experts) * chunk / layers
    assert max(found.attention, found.experts) <= min(times) + step
    assert max(found.attention, found.experts) <= max(attention, whole)


def test_at_four_to_three_a_step_is_a_tenth_faster():
    # Experts on attention's devices take half as long as on their own, as newer chips do.
    assert asymmetric_ratio(ZebraShape(24, 4, 3.0, 4.0), DeviceGroups(4, 4, 32, 0.25, 0.5, 10**9)) > 1.1
    assert asymmetric_ratio(ZebraShape(24, 4, 4.0, 4.0), DeviceGroups(4, 4, 32, 0.25, 0.5, 10**9)) == 1


def test_memory_bounds_what_moves_and_uneven_experts_are_refused():
    assert sum(squeeze(12, 3.0, DeviceGroups(4, 4, 32, 0.25, 0.5, 10)).moved) == 8
    with pytest.raises(UserError, match="num_experts is 30; expected a multiple of the 4"):
        squeeze(12, 3.0, DeviceGroups(4, 4, 30, 0.25, 0.5, 10))
