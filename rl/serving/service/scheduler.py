"""The thread that trains: requests of each model in the order of their numbers, tenants in fair shares.

Passes of several models that are next go into one call, so that small requests of many tenants fill a program of fixed
size. What comes out for a model does not depend on who else is in a call, so neither order nor company matter to it.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rl.controller.fair_share import FairShare
from rl.serving.service.messages import Datum, LossName, LossOutput, ServiceError
from rl.serving.service.verbs import ServiceBusy, UnknownId

_LOG = logging.getLogger(__name__)
_STEP = 256.0  # tokens that another task than a pass counts as


@dataclass(frozen=True, slots=True)
class TrainPass:
    """A pass of a model over rows; `forward_only`: without a gradient."""

    model: str
    rows: tuple[Datum, ...]
    loss: LossName
    config: Mapping[str, Any]
    forward_only: bool

    @property
    def tokens(self) -> int:
        """The tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)


Passes = Callable[[Sequence[TrainPass]], Sequence[LossOutput | Exception]]
Work = TrainPass | Callable[[], Any]


@dataclass(frozen=True, slots=True)
class TrainLimits:
    """Limits of the training queue.

    Attributes:
        waiting: requests of a tenant without an answer.
        rows: rows of a call that several requests share; a larger request has one of its own.
    """

    waiting: int = 1024
    rows: int = 32


@dataclass(slots=True)
class _Task:
    work: Work
    future: Future[Any]


@dataclass(slots=True)
class _ModelQueue:
    """Tasks of a model by number.

    Attributes:
        next: the number that runs next.
        last: what ends the queue, behind all of them.
    """

    tenant: str
    next: int
    waiting: dict[int, _Task] = field(default_factory=dict)
    last: _Task | None = None

    @property
    def head(self) -> _Task | None:
        """The task that can run now."""
        return self.waiting.get(self.next) or (self.last if not self.waiting else None)

    @property
    def contiguous(self) -> int:
        """The last number before which none is missing."""
        number = self.next - 1
        while number + 1 in self.waiting:
            number += 1
        return number


class TrainScheduler:
    """Runs tasks, one after the other, in a thread of its own. Any thread may call its methods."""

    def __init__(self, passes: Passes, share: FairShare, limits: TrainLimits | None = None):
        """Begin without models; `start` starts the thread.

        Args:
            passes: runs passes of several models, of each at most one; gives each its result or its error.
            share: order of tenants.
            limits: limits of tenants and of a call.
        """
        self._passes, self._share, self.limits = passes, share, limits or TrainLimits()
        self._changed = threading.Condition()
        self._models: dict[str, _ModelQueue] = {}  # the one served longest ago first
        self._unanswered: Counter[str] = Counter()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="train", daemon=True)
        self.calls = 0  # calls of `passes` and other tasks so far

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def open(self, tenant: str, model: str, first: int = 0) -> None:
        """Take tasks of a model, from number `first` on."""
        with self._changed:
            self._models[model] = _ModelQueue(tenant, first)

    def check(self, model: str, number: int) -> None:
        """Refuse a task for which there is no room now.

        A number that others wait for is always accepted: without it they would have no answer.

        Raises:
            ServiceBusy: the tenant has too many without an answer, or this one is too far ahead of the next.
        """
        with self._changed:
            queue, most = self._queue(model), self.limits.waiting
            if any(number < other for other in queue.waiting):
                return
            if self._unanswered[queue.tenant] >= most or number >= queue.next + most:
                raise ServiceBusy(f"{most} requests for training are without an answer; send more when some have one")

    def add(self, model: str, number: int, work: Work, future: Future[Any]) -> None:
        """Have work done when all smaller numbers are done; its result or error goes into the future.

        Raises:
            UnknownId: there is no such model any more.
        """
        with self._changed:
            queue = self._queue(model)
            future.set_running_or_notify_cancel()  # no cancelling: it was accepted
            queue.waiting[number] = _Task(work, future)
            self._unanswered[queue.tenant] += 1
            self._changed.notify_all()

    def contiguous(self, model: str) -> int:
        """Return the last number of a model before which none is missing."""
        with self._changed:
            return self._queue(model).contiguous

    def finish(self, model: str, after: int, work: Callable[[], Any], future: Future[Any]) -> None:
        """Have work done behind number `after`, and take no more tasks of the model; later ones fail."""
        with self._changed:
            queue = self._queue(model)
            future.set_running_or_notify_cancel()
            queue.last = _Task(work, future)
            late = [queue.waiting.pop(number) for number in sorted(queue.waiting) if number > after]
            self._unanswered[queue.tenant] += 1 - len(late)
            self._changed.notify_all()
        for task in late:
            _set(task.future, ServiceError(f"{model} was unloaded while requests before this one were missing"))

    def close(self) -> None:
        """End the thread after the current call; what waits stays without an answer here."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:  # thread was started
            self._thread.join()

    def _queue(self, model: str) -> _ModelQueue:
        queue = self._models.get(model)
        if queue is None or queue.last is not None:
            raise UnknownId("model", model)
        return queue

    # ---- in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(q.head for q in self._models.values()))
                if self._closed:
                    return
                names = self._choose()
                tasks = [self._head(name) for name in names]
            results = self._results(tasks)
            self.calls += 1
            with self._changed:
                for name, task in zip(names, tasks, strict=True):
                    self._take_out(name, task)
            for task, result in zip(tasks, results, strict=True):
                _set(task.future, result)

    def _head(self, model: str) -> _Task:
        head = self._models[model].head
        assert head is not None
        return head

    def _choose(self) -> list[str]:
        """Return the models whose tasks are next: one, or several whose passes go together.

        The first is chosen by share. Others fill the rows that are left, and are charged for them, too.
        """
        ready: dict[str, str] = {}
        for name, queue in self._models.items():
            if queue.head is not None:
                ready.setdefault(queue.tenant, name)
        chosen = [ready[self._share.choose(ready.keys())]]
        first = self._head(chosen[0]).work
        rows = len(first.rows) if isinstance(first, TrainPass) else self.limits.rows
        for name, queue in self._models.items():
            work = None if queue.head is None or name in chosen else queue.head.work
            if isinstance(work, TrainPass) and rows + len(work.rows) <= self.limits.rows:
                chosen.append(name)
                rows += len(work.rows)
        for name in chosen:
            self._models[name] = self._models.pop(name)
        return chosen

    def _results(self, tasks: Sequence[_Task]) -> Sequence[Any]:
        passes = [task.work for task in tasks if isinstance(task.work, TrainPass)]
        try:
            if passes:
                return self._passes(passes)
            return [task.work() for task in tasks if not isinstance(task.work, TrainPass)]
        except Exception as error:
            if not isinstance(error, ServiceError):
                _LOG.exception("a task of training failed")
            return [error] * len(tasks)

    def _take_out(self, name: str, task: _Task) -> None:
        """Note that a task has run."""
        queue = self._models[name]
        self._share.charge(queue.tenant, task.work.tokens if isinstance(task.work, TrainPass) else _STEP)
        self._unanswered[queue.tenant] -= 1
        if task is queue.last:
            del self._models[name]
            return
        del queue.waiting[queue.next]
        queue.next += 1


def _set(future: Future[Any], result: Any) -> None:
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
