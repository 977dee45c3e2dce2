"""The controller's CPU time for a rollout does not grow with work items, workers or records of a prompt pool.

Bounds are ratios of CPU times of one thread, six times above what they are: scans of all items were far beyond.
"""

import time
from collections.abc import Callable

import pytest

from rl.controller.heartbeats import Heartbeats
from rl.controller.ledger import Ledger
from rl.controller.prefetch import Prefetch
from rl.controller.prompt_pool import PromptPool, Record
from tests.rl.controller.test_prompt_pool import tasks


def ledger(items: int) -> None:
    made = Ledger(items)
    for _ in range(items):
        assert made.pending(range(2)) is not None
        item = made.lease("a", range(2), now=0.0, seconds=10.0)
        assert item is not None and not made.complete(item.step) and made.renew(item.lease, 20.0)
        assert not made.expire(5.0)
    for lease in range(items):
        assert made.verified(lease, ()) and not made.expire(5.0)
    assert made.complete(0) and not made.release("a")


def prefetch(keys: int) -> None:
    made: Prefetch[int, int] = Prefetch(lambda key: key)
    made._alive = True  # nothing is taken off the queue
    made.want(range(keys))
    made.want(range(keys))
    for key in reversed(range(keys)):
        assert made.get(key, lambda: True) is None
    assert list(made._queue) == list(range(keys))


def heartbeats(workers: int) -> None:
    watched = Heartbeats(10.0, clock=lambda: 0.0)
    for worker in range(workers):
        watched.heard(str(worker))
        watched.report()
        assert not watched.lost("0")


def pool(records: int) -> None:
    groups = records // 16
    made = PromptPool.Config(explore=0.0, width=1.0).build(tasks=tasks(), groups=groups, staleness=0).start(0)
    made._records = {problem: Record(solved=problem % 8, answers=8.0, draws=1) for problem in range(records)}
    made._plan(1)
    assert sum(choice.draw == 1 for choice in made._plans[1]) == groups


@pytest.mark.parametrize(
    ("work", "small", "large"), [(ledger, 200, 6400), (prefetch, 100, 6400), (heartbeats, 100, 6400), (pool, 256, 8192)]
)
def test_the_cost_of_each_is_independent_of_their_number(work: Callable[[int], None], small: int, large: int):
    def cost(n: int) -> float:
        began = time.thread_time()
        work(n)
        return (time.thread_time() - began) / n

    work(small)
    assert min(cost(large) for _ in range(2)) < 6 * min(cost(small) for _ in range(5))
