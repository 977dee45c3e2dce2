"""The schedule against all orders of small cases, and the plan against all plans."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.cost.zebra import (
    SideTimes,
    ZebraTask,
    assign_experts,
    makespan,
    plan_zebra,
    step_seconds,
    task_seconds,
    zebra_tasks,
)

TIMES = SideTimes(attention=3.0, experts=4.0, own=4.0, sent=1.0, bandwidth=1e9)


def best_makespan(tasks: dict[ZebraTask, tuple[ZebraTask, ...]], seconds: dict[ZebraTask, float]) -> float:
    """The shortest makespan of any order of the tasks of each place, by search with bounds."""
    after: dict[ZebraTask, list[ZebraTask]] = {task: [] for task in tasks}
    for task, before in tasks.items():
        for one in before:
            after[one].append(task)
    tail: dict[ZebraTask, float] = {}
    for task in reversed(list(tasks)):
        tail[task] = seconds[task] + max((tail[one] for one in after[task]), default=0.0)
    best = makespan(tasks, seconds) + 1e-9
    seen: dict[frozenset[ZebraTask], list[tuple[float, ...]]] = {}

    def search(ends: dict[ZebraTask, float], free: dict[str, float]) -> None:
        nonlocal best
        if len(ends) == len(tasks):
            best = min(best, max(ends.values()))
            return
        ready = [task for task in tasks if task not in ends and all(one in ends for one in tasks[task])]
        starts = {task: max(free[task.place], *(ends[one] for one in tasks[task]), 0.0) for task in ready}
        left = {place: sum(seconds[t] for t in tasks if t.place == place and t not in ends) for place in free}
        bound = max(max(starts[t] + tail[t] for t in ready), *(free[p] + left[p] for p in free))
        # A state as good as one seen, in all that may still matter, leads to nothing better.
        open_ends = tuple(ends[t] for t in tasks if t in ends and any(one not in ends for one in after[t]))
        mark, done = (*free.values(), *open_ends), frozenset(ends)
        if bound >= best - 1e-9 or any(
            all(a <= b for a, b in zip(old, mark, strict=True)) for old in seen.get(done, [])
        ):
            return
        seen.setdefault(done, []).append(mark)
        for task in sorted(ready, key=starts.__getitem__):
            end = starts[task] + seconds[task]
            search({**ends, task: end}, {**free, task.place: end})

    search({}, dict.fromkeys(("attention", "experts", "out", "back"), 0.0))
    return best


def seconds_of(times: SideTimes, count: int, moved: tuple[int, ...], experts: int = 8) -> dict[ZebraTask, float]:
    tasks = zebra_tasks(count, moved)
    return {task: task_seconds(task, times, count, moved[task.layer] / experts) for task in tasks}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    attention=st.integers(1, 9),
    experts=st.integers(1, 9),
    sent=st.integers(0, 4),
    loss=st.integers(1, 4),
    shape=st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]),
)
def test_no_order_ends_earlier(attention: int, experts: int, sent: int, loss: int, shape: tuple[int, int]):
    layers, count = shape
    times = SideTimes(attention, experts, experts, sent, 1.0, loss=loss * attention)
    tasks, seconds = zebra_tasks(count, (0,) * layers), seconds_of(times, count, (0,) * layers)
    assert makespan(tasks, seconds) == pytest.approx(best_makespan(tasks, seconds))


@pytest.mark.slow
def test_without_a_loss_an_order_of_one_layer_can_end_earlier():
    """The bound of the claim: there experts had better begin to go back before the last of them goes forward."""
    times = SideTimes(7.0, 4.0, 4.0, 0.0, 1.0)
    tasks, seconds = zebra_tasks(3, (0,)), seconds_of(times, 3, (0,))
    assert 1.05 < makespan(tasks, seconds) / best_makespan(tasks, seconds) < 1.12


def test_every_task_waits_for_earlier_ones_and_each_place_has_its_own():
    tasks = zebra_tasks(3, (1, 0))
    seen: set[ZebraTask] = set()
    for task, before in tasks.items():
        assert set(before) <= seen
        seen.add(task)
    assert sum(task.place == "experts" for task in tasks) == 2 * 2 * 3
    assert sum(task.kind.startswith("own") for task in tasks) == 2 * 3  # of the first layer alone
    order = [task for task in tasks if task.place == "experts"]
    assert order == sorted(order, key=lambda task: (task.kind != "forward", abs(task.layer - (task.kind != "forward"))))


def test_equal_times_overlap_nearly_whole():
    equal = dataclasses.replace(TIMES, attention=1.0, experts=1.0)
    alone = 4 * 4 * 2.0  # 4 layers, forward and three times that backwards, both sides one after the other
    for count, least in ((1, 1.0), (2, 1.7), (4, 1.85)):
        assert least <= alone / step_seconds(equal, count, (0,) * 4, 8) + 1e-6 <= 2.0 + 1e-6


def test_experts_move_by_the_derived_rule():
    assert assign_experts(TIMES, 6, 8, chunk=1, most=None) == (1,) * 6  # 4 - 1/2 = 3 + 1/2
    assert assign_experts(TIMES, 6, 8, chunk=2, most=None) == (0, 2, 0, 2, 0, 2)
    assert sum(assign_experts(TIMES, 6, 8, chunk=1, most=3)) <= 3
    assert assign_experts(dataclasses.replace(TIMES, attention=4.0), 6, 8, chunk=1, most=None) == (0,) * 6
    gain = step_seconds(TIMES, 4, (0,) * 6, 8) / step_seconds(TIMES, 4, (1,) * 6, 8)
    assert 1.10 < gain < 4 / 3.5


@settings(max_examples=25, deadline=None)
@given(attention=st.floats(1.0, 4.0), experts=st.floats(1.0, 8.0), own=st.floats(1.0, 8.0))
def test_a_plan_is_near_the_best_of_all_plans(attention: float, experts: float, own: float):
    times = SideTimes(attention, experts, own, 1.0, 1e9)
    plan = plan_zebra(times, 2, 4, (1, 2, 4))
    every = itertools.product((1, 2, 4), itertools.product(range(4), repeat=2))
    best = min(step_seconds(times, count, moved, 4) for count, moved in every)
    chunk = 4 * (experts + own) / 4 / 4  # a chunk is what rounding may leave, forward and backward of each layer
    assert best - 1e-9 <= plan.seconds <= best + 2 * 4 * chunk
    assert plan.seconds <= step_seconds(times, 4, (0, 0), 4) * 1.002


def test_too_slow_a_network_is_named():
    """The paper's own case: at 20 Gbit/s nothing is gained that 100 Gbit/s gains."""
    times = SideTimes(attention=0.01, experts=0.01, own=0.02, sent=64e6, bandwidth=100e9 / 8)
    plan = plan_zebra(times, 8, 16, (1, 2, 4, 8))
    assert plan.hidden_from == pytest.approx(64e6 / 0.01)
    assert plan.break_even is not None and plan.break_even < plan.hidden_from
    for factor, faster in ((0.99, False), (1.01, True)):
        there = dataclasses.replace(times, bandwidth=plan.break_even * factor)
        assert (step_seconds(there, plan.microbatches, plan.moved, 16) < plan.alone) == faster
    assert "break-even bandwidth" in plan.line() and "Gbit/s" in plan.line()
    never = dataclasses.replace(times, experts=0.1)
    hopeless = plan_zebra(never, 8, 16, (1, 2), most=0)
    assert hopeless.break_even is None and "no bandwidth" in hopeless.line()
