"""Queues of training requests: each model has its own, in the order of numbers, with answers kept for repeats."""

import dataclasses
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rl.serving.service.messages import LoraSpec, LossOutput, ServiceError, TrainPass

Work = TrainPass | Callable[[], Any]


@dataclasses.dataclass(slots=True)
class Task:
    """Parts of a request that are left, and results of those that have run."""

    parts: deque[Work]
    future: Future[Any]
    results: list[Any] = dataclasses.field(default_factory=list)

    def take(self, result: Any) -> bool:
        """Take the result of the first part; returns True if the request is done, or has failed."""
        self.parts.popleft()
        self.results.append(result)
        return isinstance(result, Exception) or not self.parts

    def answer(self) -> None:
        """Give the result to those who wait for it."""
        result, *others = self.results[-1:] if isinstance(self.results[-1], Exception) else self.results
        if isinstance(result, Exception):
            return self.future.set_exception(result)
        for other in others:
            metrics = {name: value + other.metrics[name] for name, value in result.metrics.items()}
            result = LossOutput((*result.logprobs, *other.logprobs), metrics)
        self.future.set_result(result)


@dataclasses.dataclass(slots=True)
class ModelQueue:
    """A model that has a slot, or is about to have one, and its requests."""

    tenant: str  # owner
    created: float = 0.0  # seconds since the epoch
    spec: LoraSpec = LoraSpec(1)
    next: int = 0  # the number that runs next
    kept_from: int = 0  # the first number whose answer is kept
    answers: dict[int, Future[Any]] = dataclasses.field(default_factory=dict)  # futures of requests by number
    waiting: dict[int, Task] = dataclasses.field(default_factory=dict)  # tasks by number that have not run
    last: Task | None = None  # end of the queue, behind all of them
    ending: Future[Any] | None = None  # future of that

    @property
    def head(self) -> Task | None:
        """The task that can run now."""
        return self.waiting.get(self.next) or (self.last if not self.waiting else None)

    @property
    def contiguous(self) -> int:
        """The last number before which none is missing."""
        number = self.next - 1
        while number + 1 in self.waiting:
            number += 1
        return number

    def fail_behind(self, number: int, why: str) -> int:
        """Fail what waits behind a number; returns how many those were."""
        late = [self.waiting.pop(other) for other in sorted(self.waiting) if other > number]
        for task in late:
            task.future.set_exception(ServiceError(why))
        return len(late)
