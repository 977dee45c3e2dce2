"""The thread that trains: requests of each model in the order of their numbers, tenants in fair shares.

Passes of several models that are next go into one call, and so do passes of one model that follow each other: small
requests fill a program of fixed size. A large pass is cut into parts, and the work of others comes between them. What
comes out for a model does not depend on who else is in a call, so neither order nor company matter to it.
"""

import dataclasses
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from rl.controller.fair_share import PAUSE, FairShare
from rl.serving.service.messages import LossOutput, ServiceBusy, ServiceError, TrainPass, UnknownId
from rl.serving.service.queues import ModelQueue, Task, Work

_LOG = logging.getLogger(__name__)
_STEP = 256.0  # tokens that another task than a pass counts as
_ROW = 32  # tokens that a row counts as at least: it is computed with so many
_GONE = 256  # models whose answers are kept after their end

Passes = Callable[[Sequence[TrainPass]], Sequence[LossOutput]]


class TrainScheduler:
    """Models by id; runs their tasks, one after the other, in a thread of its own. Any thread may call its methods."""

    def __init__(self, passes: Passes, share: FairShare, *, waiting: int = 1024, rows: int = 32, slots: int = 1 << 20):
        """Begin without models; `start` starts the thread.

        Args:
            passes: runs passes of several models; those of one model in the order of their numbers.
            share: order of tenants.
            waiting: requests of a tenant without an answer, at most.
            rows: rows of a call, and of a part of a larger pass.
            slots: models at the same time.
        """
        self._passes, self._share, self._waiting, self._rows, self._slots = passes, share, waiting, rows, slots
        self._changed = threading.Condition(threading.RLock())
        self._models: dict[str, ModelQueue] = {}  # the one served longest ago first
        self._gone: dict[str, ModelQueue] = {}
        self._unanswered: Counter[str] = Counter()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="train", daemon=True)
        self.calls = 0  # calls of `passes` and other tasks so far
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

    def close(self) -> None:
        """End the thread after the current call; what waits stays without an answer here."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:  # thread was started
            self._thread.join()

    # ---- models

    def open(self, model: str, queue: ModelQueue) -> None:
        """Take a model, to be created next, once (UnknownId: it is another tenant's; ServiceError: no slot)."""
        with self._changed:
            if model in self._models:
                self.find(queue.tenant, model)
                return
            if len(self._models) >= self._slots:
                raise ServiceError(f"all {self._slots} slots are taken; unload a model, or try again later")
            self._gone.pop(model, None)
            self._models[model] = queue

    def find(self, tenant: str, model: str) -> ModelQueue:
        """Return a model of a tenant (UnknownId)."""
        with self._changed:
            queue = self._models.get(model)
            if queue is None or queue.tenant != tenant:
                raise UnknownId("model", model)
            return queue

    def every(self, tenant: str | None = None) -> dict[str, ModelQueue]:
        """Return all models, or those of a tenant."""
        with self._changed:
            return {name: one for name, one in self._models.items() if tenant in (None, one.tenant)}

    def recall(self, tenant: str, model: str, seq: int) -> Future[Any] | None:
        """Return the future of a request; None: it is not there, or not any more."""
        with self._changed:
            queue = self._models.get(model) or self._gone.get(model)
            return queue.answers.get(seq) if queue is not None and queue.tenant == tenant else None

    def forget_before(self, model: str, number: int) -> None:
        """Drop the answers of smaller numbers, which no replay would give again."""
        with self._changed:
            queue = self._models[model]
            queue.kept_from = max(queue.kept_from, number)
            for old in [one for one in queue.answers if one < number]:
                del queue.answers[old]

    def remove(self, model: str) -> None:
        """Drop a model that has no slot any more; its answers stay for a while, and what waits behind it fails."""
        with self._changed:
            queue = self._gone[model] = self._models.pop(model)
            while len(self._gone) > _GONE:
                del self._gone[next(iter(self._gone))]
            failed = queue.fail_behind(queue.next, f"{model} could not be created")
            self._unanswered[queue.tenant] -= failed

    # ---- tasks

    def reserve(self, tenant: str, model: str, number: int) -> tuple[Future[Any], bool]:
        """Return the future of a request, and whether it is new: `add` or `release` is called then.

        A number that others wait for always has room: without it they would have no answer.

        Raises:
            UnknownId: the tenant has no such model.
            ServiceBusy: it has too many requests without an answer, or this one is too far ahead of the next.
            ServiceError: the answer of this number is not kept any more.
        """
        with self._changed:
            queue, most = self.find(tenant, model), self._waiting
            if (known := queue.answers.get(number)) is not None:
                return known, False
            if queue.ending is not None:
                raise UnknownId("model", model)
            if number < queue.kept_from:
                raise ServiceError(f"{model}: request {number} was run long ago, and its answer is not kept any more")
            full = self._unanswered[tenant] >= most or number >= queue.next + most
            if number and full and not any(number < other for other in queue.waiting):
                said = f"{most} requests for training are without an answer; send more when some have one"
                raise ServiceBusy(said + self._share.quota(tenant))
            future = queue.answers[number] = Future()
            return future, True

    def release(self, model: str, number: int, error: Exception) -> None:
        """Give up a request that was reserved; one of creation takes its model along."""
        with self._changed:
            queue = self._models[model]
            queue.answers.pop(number).set_exception(error)
            if not number:
                del self._models[model]

    def add(self, model: str, number: int, work: Work) -> Future[Any]:
        """Have work done after all smaller numbers, for the number's future (UnknownId: no model, or it ends)."""
        with self._changed:
            queue = self._models.get(model)
            if queue is None or queue.ending is not None:
                raise UnknownId("model", model)
            future = queue.answers.setdefault(number, Future())
            future.set_running_or_notify_cancel()  # no cancelling: it was accepted
            queue.waiting[number] = Task(self._parts(work), future)
            self._unanswered[queue.tenant] += 1
            self._changed.notify_all()
            return future

    def reserve_end(self, tenant: str, model: str) -> tuple[Future[Any], int | None]:
        """Return the future of a model's end, and the number that it comes behind; None: it is accepted already."""
        with self._changed:
            queue = self.find(tenant, model)
            if queue.ending is not None:
                return queue.ending, None
            queue.ending = Future()
            return queue.ending, queue.contiguous

    def finish(self, model: str, after: int, work: Callable[[], Any], ending: Future[Any]) -> None:
        """Have work done behind number `after`, and take no more tasks of the model; later ones fail."""
        with self._changed:
            queue = self._models[model]
            queue.ending = ending
            ending.set_running_or_notify_cancel()
            queue.last = Task(deque([work]), ending)
            late = queue.fail_behind(after, f"{model} was unloaded while requests before this one were missing")
            self._unanswered[queue.tenant] += 1 - late
            self._changed.notify_all()

    def _parts(self, work: Work) -> deque[Work]:
        if not isinstance(work, TrainPass):
            return deque([work])
        rows, most = work.rows, self._rows
        return deque(dataclasses.replace(work, rows=rows[at : at + most]) for at in range(0, len(rows) or 1, most))

    # ---- in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._idle or any(q.head for q in self._models.values()))
                if self._closed:
                    return
                chosen = self._choose()
                if not chosen and not self._idle:
                    self._changed.wait(PAUSE)
                    continue
            parts = [task.parts[0] for _, task in chosen] or [self._idle.popleft()]
            results = self._results(parts)
            self.calls += len(chosen) > 0
            with self._changed:
                done = [self._take_out(*one, result) for one, result in zip(chosen, results, strict=False)]
            for (_, task), whole in zip(chosen, done, strict=True):
                if whole:
                    task.answer()

    def _choose(self) -> list[tuple[ModelQueue, Task]]:
        """Return the tasks that are next: one, or several whose passes go together; none, if none may run now.

        The first is chosen by share. Others fill the rows that are left, and are charged for them, too: first those of
        other models, then those that follow.
        """
        heads = {name: head for name, queue in self._models.items() if (head := queue.head) is not None}
        within = self._share.within({self._models[name].tenant for name in heads})
        heads = {name: head for name, head in heads.items() if self._models[name].tenant in within}
        if not heads:
            return []
        ready: dict[str, str] = {}
        for name in heads:
            ready.setdefault(self._models[name].tenant, name)
        first = ready[self._share.choose(ready.keys())]
        chosen, rows = {first: heads.pop(first)}, self._rows
        if isinstance(part := chosen[first].parts[0], TrainPass):
            rows = len(part.rows)
        for name, head in heads.items():
            if isinstance(part := head.parts[0], TrainPass) and rows + len(part.rows) <= self._rows:
                chosen[name] = head
                rows += len(part.rows)
        for name in chosen:
            self._models[name] = self._models.pop(name)
        return self._followed([(self._models[name], task) for name, task in chosen.items()], self._rows - rows)

    def _followed(self, chosen: list[tuple[ModelQueue, Task]], room: int) -> list[tuple[ModelQueue, Task]]:
        """Return chosen tasks, and passes behind them while there are rows left, a pass of each model in turn."""
        found, last = list(chosen), [(queue, task, queue.next) for queue, task in chosen]
        while last:
            following = list[tuple[ModelQueue, Task, int]]()
            for queue, task, number in last:
                behind, whole = queue.waiting.get(number + 1), len(task.parts) == 1
                if not whole or behind is None or not isinstance(task.parts[0], TrainPass):
                    continue
                part = behind.parts[0]
                if isinstance(part, TrainPass) and len(part.rows) <= room and not self._share.quota(queue.tenant):
                    room -= len(part.rows)
                    found.append((queue, behind))
                    following.append((queue, behind, number + 1))
            last = following
        return found

    def _results(self, parts: Sequence[Work]) -> Sequence[Any]:
        try:
            passes = [part for part in parts if isinstance(part, TrainPass)]
            return self._passes(passes) if passes else [part() for part in parts if not isinstance(part, TrainPass)]
        except Exception as error:
            if not isinstance(error, ServiceError):
                _LOG.exception("a task of training failed")
            return [error] * len(parts)

    def _take_out(self, queue: ModelQueue, task: Task, result: Any) -> bool:
        """Note that the first part of a task has run; returns True if it was the last one."""
        part = task.parts[0]
        self._share.charge(
            queue.tenant, max(part.tokens, _ROW * len(part.rows)) if isinstance(part, TrainPass) else _STEP
        )
        if not task.take(result):
            return False
        self._unanswered[queue.tenant] -= 1
        if task is queue.last:
            queue.last = None
        else:
            del queue.waiting[queue.next]
            queue.next += 1
        return True
