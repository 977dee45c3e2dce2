"""A controller whose trainer, workers and clock are played by the test."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from axlearn_like.run.events import EventLog
from axlearn_like.tokenizers.bytes import ByteTokenizer
from rl.controller.controller import Controller
from rl.protocol.messages import Group, Lease
from rl.tasks.mixture import TaskMixture
from tests.rl.tiny import make_group, tiny_tasks

STEPS = 7


@functools.cache
def mixture() -> TaskMixture:
    """Return the problems; not when this file is imported, since their library takes seconds to import."""
    return tiny_tasks().build()


class Clock:
    """A clock that the test advances."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def config(**changes: Any) -> Controller.Config:
    cfg = Controller.Config(
        tasks=tiny_tasks(),
        tokenizer=ByteTokenizer.Config(),
        num_steps=STEPS,
        prompts_per_step=4,
        samples_per_prompt=2,
        groups_per_lease=2,
        lease_seconds=60.0,
    )
    return cfg.set(**changes)


def make(clock: Callable[[], float] | None = None, events: EventLog | None = None, **changes: Any) -> Controller:
    return config(**changes).build(clock=clock or Clock(), events=events)


def scored(lease: Lease) -> tuple[Group, ...]:
    """Return scored groups as a worker submits them: rollouts of the version that the lease names."""
    return tuple(make_group(p, [[1, 2]] * lease.samples, [0.0, 1.0], version=lease.version) for p in lease.prompts)


def granted(controller: Controller, worker: str = "w") -> Lease:
    lease = controller.lease(worker)
    assert lease is not None
    return lease


def drain(controller: Controller, worker: str = "w") -> list[Lease]:
    """Lease all that can be leased now."""
    return list(iter(lambda: controller.lease(worker), None))


def ids(lease: Lease) -> list[int]:
    return [prompt.id for prompt in lease.prompts]


def assert_same_prompts(a: Lease, b: Lease) -> None:
    assert (ids(a), a.step, a.version, a.samples) == (ids(b), b.step, b.version, b.samples)
    for one, other in zip(a.prompts, b.prompts, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
