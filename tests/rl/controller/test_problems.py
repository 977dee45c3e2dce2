"""Problems that take long, or cannot be made."""

import threading
from typing import Any

import pytest

from axlearn_like.run.clock import REAL
from mesh import UserError
from rl.protocol.messages import Lease
from rl.tasks.mixture import TaskMixture
from tests.rl.controller.scripted import assert_same_prompts, drain, granted, ids, make, scored
from tests.rl.tasks.numbers import Numbers


def numbers(**fields: Any) -> TaskMixture.Config:
    return TaskMixture.Config(families=(Numbers.Config(label="numbers", **fields),), heldout_every=10**9)


def test_problems_are_made_outside_the_lock(monkeypatch: pytest.MonkeyPatch):
    gate, asked = threading.Event(), threading.Event()
    controller = make(clock=REAL, tasks=numbers())
    train = controller._plan._tasks.train

    def train_slowly(index: int) -> Any:
        asked.set()
        assert gate.wait(60)
        return train(index)

    controller._plan._tasks.train = train_slowly
    found: list[Lease | None] = []
    thread = threading.Thread(target=lambda: found.append(controller.lease("w", timeout=60.0)))
    controller.begin(0, 0)
    thread.start()
    assert asked.wait(60)
    assert controller.status()["leased"] == 0 and not controller.renew(0) and controller.next_batch(0) is None
    assert thread.is_alive()  # nobody waited for the problem but who asked for it
    monkeypatch.setattr("rl.controller.controller.PROMPTS_WAIT", 0.01)
    assert controller.lease("v") is None  # and nobody for ever
    gate.set()
    thread.join(60)
    plain = make(tasks=numbers())
    plain.begin(0, 0)
    assert found[0] is not None
    assert_same_prompts(found[0], granted(plain))


def test_a_problem_that_never_comes_is_left_out_of_every_lease():
    plain = make(tasks=numbers())
    plain.begin(0, 0)
    first, second = drain(plain)
    controller = make(tasks=numbers(endless=(ids(first)[0],)), problem_seconds=0.5)
    controller.begin(0, 0)
    lease = granted(controller)
    assert ids(lease) == [ids(first)[0] + 1, ids(first)[1]]
    assert_same_prompts(granted(controller), second)
    assert controller.status()["skipped"] == {"numbers": {"slow": 1}}
    for one in (lease, second):
        assert controller.submit(one.id, scored(one))
    assert controller.consumed(0) == {"problems_slow": 1.0}


def test_what_raises_while_prompts_are_made_leaves_nothing_leased():
    controller = make(tasks=numbers(bad=tuple(range(4))))
    controller.begin(0, 0)
    for _ in range(2):
        with pytest.raises(UserError, match="of the 4 items for training problem 0"):
            controller.lease("w")
    assert controller.status()["leased"] == 0
