"""Work that is done ahead, in its own thread: what is asked for comes first, once, and `get` raises errors."""

import threading
import time

import pytest

from rl.controller.prefetch import Prefetch


def test_results_are_made_once_and_in_order_and_what_is_asked_for_comes_first():
    order: list[int] = []
    gate = threading.Event()

    def make(key: int) -> int:
        gate.wait(10)
        order.append(key)
        return key * key

    made = Prefetch(make)
    made.want([1, 2, 3])
    made.want([2, 3, 4])
    assert not made.ready(4) and made.get(4, lambda: True) is None  # who asks has stopped
    thread = threading.Thread(target=made.get, args=(9,))
    thread.start()
    while 9 not in made._queue and made._making != 9:  # it may be taken at once
        time.sleep(0.001)
    gate.set()
    assert [made.get(key) for key in (4, 1, 2, 3, 9)] == [16, 1, 4, 9, 81]
    thread.join(10)
    assert sorted(order) == [1, 2, 3, 4, 9] and order.index(9) <= 2
    made.keep(lambda key: key > 3)
    assert made.ready(4) and not made.ready(1)


def test_an_error_reaches_everyone_who_asks_and_the_others_are_made():
    def make(key: int) -> int:
        if key == 1:
            raise ValueError("no 1")
        return key

    made = Prefetch(make)
    made.want([1, 2])
    for _ in range(2):
        with pytest.raises(ValueError, match="no 1"):
            made.get(1)
    assert made.get(2) == 2
