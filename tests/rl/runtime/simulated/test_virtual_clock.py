"""The virtual clock: order, waits, kills and errors."""

import random
from typing import Any

import pytest

from rl.runtime.simulated.virtual_clock import VirtualClock


def test_time_passes_as_in_a_sorted_list_of_all_sleeps():
    rng = random.Random(0)
    naps = {f"p{n}": [rng.choice((0.0, 0.5, rng.random() * 10)) for _ in range(20)] for n in range(30)}
    clock, seen = VirtualClock(), []

    def process(name: str) -> None:
        for seconds in naps[name]:
            clock.sleep(seconds)
            seen.append((clock(), name))

    for name in naps:
        clock.spawn(name, lambda name=name: process(name))
    clock.run()
    expected = []
    for name, seconds in naps.items():
        now = 0.0
        for nap in seconds:
            now += nap
            expected.append((now, name))
    assert sorted(seen) == sorted(expected)
    assert [when for when, _ in seen] == sorted(when for when, _ in seen)


def test_a_condition_is_woken_or_times_out():
    clock, said = VirtualClock(), []
    changed, box = clock.condition(), list[int]()

    def waiter() -> None:
        with changed:
            said.append((changed.wait(5.0), clock()))
            said.append((changed.wait_for(lambda: box, 100.0), clock()))
            said.append((changed.wait_for(lambda: len(box) > 1, 7.0), clock()))

    def teller() -> None:
        clock.sleep(8.0)
        with changed:
            changed.notify_all()  # not what is waited for
        clock.sleep(1.0)
        with changed:
            box.append(1)
            changed.notify()

    clock.spawn("waiter", waiter)
    clock.spawn("teller", teller)
    clock.run()
    assert said == [(False, 5.0), ([1], 9.0), (False, 16.0)]


def test_a_killed_group_never_runs_again_and_its_locks_stay_held():
    clock, said = VirtualClock(), []
    lock = clock.lock()

    def child() -> None:
        clock.sleep(3.0)
        said.append("child")

    def victim() -> None:
        clock.thread(child, "child")
        try:
            with lock:
                clock.sleep(10.0)
        finally:
            if not clock.closing:
                said.append("finally")

    def killer() -> None:
        clock.sleep(2.0)
        assert clock.kill("victim") == 2
        said.append(lock.acquire(blocking=False))
        clock.sleep(20.0)

    clock.spawn("victim", victim)
    clock.spawn("killer", killer)
    clock.run()
    assert said == [False] and clock() == 22.0


def test_a_lock_goes_to_who_waits_longest():
    clock, said = VirtualClock(), []
    lock = clock.lock()

    def process(name: str) -> None:
        with lock:
            clock.sleep(1.0)
            said.append((name, clock()))

    for name in "abc":
        clock.spawn(name, lambda name=name: process(name))
    clock.run()
    assert said == [("a", 1.0), ("b", 2.0), ("c", 3.0)]


def test_timers_can_be_cancelled_and_errors_come_out():
    clock, said = VirtualClock(), list[Any]()
    clock.timer(1.0, lambda: said.append(clock()))
    cancelled = clock.timer(2.0, lambda: said.append("no"))
    cancelled.cancel()
    assert not cancelled.is_alive()

    def fails() -> None:
        clock.sleep(3.0)
        raise ValueError("as it should")

    clock.spawn("fails", fails)
    with pytest.raises(ValueError, match="as it should"):
        clock.run()
    assert said == [1.0]
    with pytest.raises(RuntimeError, match="nothing but a simulated process"):
        clock.condition().wait(1.0)
