"""The thread that trains: requests of each model in the order of their numbers, tenants in fair shares.

Passes of several models that are next go into one call, so that small requests of many tenants fill a program of fixed
size; a large pass is cut into parts, and the work of others comes between them. What comes out for a model does not
depend on who else is in a call, so neither order nor company matter to it.
"""

import dataclasses
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from rl.controller.fair_share import FairShare
from rl.serving.service.messages import LossOutput, ServiceBusy, ServiceError, TrainPass, UnknownId

_LOG = logging.getLogger(__name__)
_STEP = 256.0  # tokens that another task than a pass counts as

Passes = Callable[[Sequence[TrainPass]], Sequence[LossOutput]]
Work = TrainPass | Callable[[], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class TrainLimits:
    """Limits of the training queue.

    Attributes:
        waiting: requests of a tenant without an answer.
        rows: rows of a call, and of a part of a larger pass.
    """

    waiting: int = 1024
    rows: int = 32


@dataclasses.dataclass(slots=True)
class _Task:
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
class _ModelQueue:
    """Tasks of a model by number.

    Attributes:
        next: the number that runs next.
        last: what ends the queue, behind all of them.
    """

    tenant: str
    next: int
    waiting: dict[int, _Task] = dataclasses.field(default_factory=dict)
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
    """Runs tasks, one after the other, in a thread of its own. Any thread may call its methods.

    Attributes:
        calls: calls of `passes` and other tasks so far.
    """

    def __init__(self, passes: Passes, share: FairShare, limits: TrainLimits | None = None):
        """Begin without models; `start` starts the thread.

        Args:
            passes: runs passes of several models, of each at most one.
            share: order of tenants.
            limits: limits of tenants and of a call.
        """
        self._passes, self._share, self.limits = passes, share, limits or TrainLimits()
        self._changed = threading.Condition()
        self._models: dict[str, _ModelQueue] = {}  # the one served longest ago first
        self._unanswered: Counter[str] = Counter()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="train", daemon=True)
        self.calls = 0
        self._idle: deque[Callable[[], Any]] = deque()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while tasks are run."""
        return self._thread.is_alive()

    def when_idle(self, work: Iterable[Callable[[], Any]]) -> None:
        """Have work done while there are no tasks, such as compiling."""
        with self._changed:
            self._idle.extend(work)
            self._changed.notify_all()

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
            queue.waiting[number] = _Task(self._parts(work), future)
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
            queue.last = _Task(deque([work]), future)
            late = [queue.waiting.pop(number) for number in sorted(queue.waiting) if number > after]
            self._unanswered[queue.tenant] += 1 - len(late)
            self._changed.notify_all()
        for task in late:
            said = f"{model} was unloaded while requests before this one were missing"
            task.future.set_exception(ServiceError(said))

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

    def _parts(self, work: Work) -> deque[Work]:
        if not isinstance(work, TrainPass):
            return deque([work])
        rows, most = work.rows, self.limits.rows
        return deque(dataclasses.replace(work, rows=rows[at : at + most]) for at in range(0, len(rows) or 1, most))

    # ---- in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._idle or any(q.head for q in self._models.values()))
                if self._closed:
                    return
                tasks = self._choose()
            parts = [task.parts[0] for task in tasks.values()] or [self._idle.popleft()]
            results = self._results(parts)
            self.calls += len(tasks) > 0
            with self._changed:
                done = [self._take_out(name, task, results[place]) for place, (name, task) in enumerate(tasks.items())]
            for task, whole in zip(tasks.values(), done, strict=True):
                if whole:
                    task.answer()

    def _choose(self) -> dict[str, _Task]:
        """Return the tasks that are next, by model: one, or several whose passes go together; none, if none is ready.

        The first is chosen by share. Others fill the rows that are left, and are charged for them, too.
        """
        heads = {name: head for name, queue in self._models.items() if (head := queue.head) is not None}
        if not heads:
            return {}
        ready: dict[str, str] = {}
        for name in heads:
            ready.setdefault(self._models[name].tenant, name)
        first = ready[self._share.choose(ready.keys())]
        chosen, rows = {first: heads.pop(first)}, self.limits.rows
        if isinstance(part := chosen[first].parts[0], TrainPass):
            rows = len(part.rows)
        for name, head in heads.items():
            if isinstance(part := head.parts[0], TrainPass) and rows + len(part.rows) <= self.limits.rows:
                chosen[name] = head
                rows += len(part.rows)
        for name in chosen:
            self._models[name] = self._models.pop(name)
        return chosen

    def _results(self, parts: Sequence[Work]) -> Sequence[Any]:
        try:
            passes = [part for part in parts if isinstance(part, TrainPass)]
            return self._passes(passes) if passes else [part() for part in parts if not isinstance(part, TrainPass)]
        except Exception as error:
            if not isinstance(error, ServiceError):
                _LOG.exception("a task of training failed")
            return [error] * len(parts)

    def _take_out(self, name: str, task: _Task, result: Any) -> bool:
        """Note that the first part of a task has run; returns True if it was the last one."""
        queue, part = self._models[name], task.parts[0]
        self._share.charge(queue.tenant, part.tokens if isinstance(part, TrainPass) else _STEP)
        if not task.take(result):
            return False
        self._unanswered[queue.tenant] -= 1
        if task is queue.last:
            del self._models[name]
        else:
            del queue.waiting[queue.next]
            queue.next += 1
        return True
