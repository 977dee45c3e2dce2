"""Timeouts are checked, and long waits are reported at the right moments."""

import pytest

from mesh import UserError
from rl.protocol.timeouts import Timeouts, Waits


class Clock:
    def __init__(self):
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_is_due_after_the_given_seconds_and_each_time_it_has_doubled():
    clock = Clock()
    waits = Waits(3.0, clock)
    reported = []
    for _ in range(20):
        waits.begin("a")
        reported += [clock.now - 5.0] if waits.due("a") else []
        clock.now += 1.0
    assert reported == [3.0, 6.0, 12.0]
    assert waits.begin("a") == 20.0
    waits.end("a")
    assert not waits.due("a") and waits.begin("a") == 0.0


def test_waits_are_independent():
    clock = Clock()
    waits = Waits(3.0, clock)
    waits.begin("a")
    clock.now += 2.0
    waits.begin("b")
    clock.now += 2.0
    assert waits.due("a") and not waits.due("b")
    waits.clear()
    assert waits.begin("b") == 0.0
    waits.end("never begun")


@pytest.mark.parametrize("name", ["grace", "warn_after", "unresponsive", "restart", "batch"])
def test_a_timeout_that_is_not_positive_is_refused_by_name(name: str):
    with pytest.raises(UserError, match=rf"Timeouts\.{name}: expected seconds, more than 0, got 0\.0"):
        Timeouts.Config(**{name: 0.0}).build()
