"""Samples and scores of prompts for many tenants from one engine.

Requests wait in a queue of each tenant; only as many sequences go into the engine as it has rows, tenants in fair
shares, so that the backlog of one costs the others nothing. No tenant gets more rows than its share among those that
have come lately, so that a request of another finds a row, and steps that are not slowed by a flood. Samples of a
request go in by parts of fixed size, each with a seed of its own: the answer depends on the request alone.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from axlearn_like.input.shuffle import derived_seed
from axlearn_like.layers.wrappers.adapters import Adapter
from rl.controller.fair_share import PAUSE, FairShare
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, RequestOutput
from rl.serving.engine_thread import Done, EngineThread, Event, EventReceiver, Failed
from rl.serving.service.engine_adapters import EngineAdapters
from rl.serving.service.messages import ServiceBusy, ServiceError

_RECENT = 256  # parts after which a tenant that sends none more has no claim on rows
PART = 4  # samples that go into the engine together; they have one seed
_SEEDS = 2**32


def whole(output: RequestOutput) -> RequestOutput:
    """Return an output as it came."""
    return output


class _Draw:
    """A request on its way: parts that wait, and what has come out."""

    def __init__(self, tenant: str, request: Request, finish: Callable[[RequestOutput], Any]):
        self.tenant, self.request, self.finish = tenant, request, finish
        self.waiting = deque(_parts(request))
        self.running: list[_Part] = []
        self.outputs: list[RequestOutput | None] = [None] * len(self.waiting)
        self.future: Future[Any] = Future()
        self.over = False  # an answer or an error is on its way, or nobody waits for it


class _Part(EventReceiver):
    """Samples of a request that are in the engine."""

    def __init__(self, owner: "SamplingQueue", draw: _Draw, request: Request):
        super().__init__([request])
        self.draw, self.samples = draw, request.samples
        self.number = len(draw.outputs) - len(draw.waiting) - 1
        self._owner = owner

    def post(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Done | Failed):
                self._owner.ended(self, event)


class SamplingQueue:
    """Requests of all tenants, admitted into the engine in fair shares. Any thread may call its methods."""

    def __init__(
        self,
        engine: EngineThread,
        cfg: RolloutEngine.Config,
        share: FairShare,
        read: Callable[[str], Adapter],
        places: int,
        waiting: int = 2048,
    ):
        """Begin without requests.

        Args:
            share: order of tenants.
            read: returns the adapter of a name, which `sample` gives.
            places: adapters that the engine has room for.
            waiting: requests of a tenant without an answer, at most.
        """
        self._engine, self._rows_of_engine, self._share = engine, cfg.max_num_seqs, share
        self._waiting = waiting
        self._lock = threading.RLock()
        self._adapters = EngineAdapters(engine, places, read, self._lock, self._adapter_changed)
        self._queues: dict[str, deque[_Draw]] = {}
        self._unanswered = Counter[str]()
        self._rows = Counter[str]()  # sequences in the engine by tenant
        self._next: str | None = None  # tenant that was chosen, and waits for free rows
        self._sent = 0  # parts so far
        self._seen: dict[str, int] = {}  # the last part of each tenant, the oldest first
        self._closed = False
        self._timer: threading.Timer | None = None

    # ---- calls

    def sample(self, tenant: str, request: Request, finish: Callable[[RequestOutput], Any] = whole) -> Future[Any]:
        """Draw samples of an adapter, or of the base; the future can be cancelled.

        Args:
            tenant: who asks.
            request: a request of the engine, with a seed and conditions to stop of its own.
            finish: makes the future's result of what came out.

        Raises:
            ServiceBusy: too many requests of this tenant are unanswered.
        """
        draw = _Draw(tenant, request, finish)
        with self._lock:
            if self._closed:
                raise ServiceError("the service is shutting down", "server")
            if self._unanswered[tenant] >= self._waiting:
                said = f"{self._waiting} requests for samples are unanswered; ask for more when some are"
                raise ServiceBusy(said + self._share.quota(tenant))
            self._unanswered[tenant] += 1
            self._queues.setdefault(tenant, deque()).append(draw)
            self._admit()
        draw.future.add_done_callback(lambda _: self._answered(draw))
        return draw.future

    def prepare(self, adapter: str) -> None:
        """Load an adapter ahead of its first request, if there is room."""
        with self._lock:
            self._adapters.want([*(queue[0].request.adapter for queue in self._queues.values()), adapter])

    def forget(self, adapter: str) -> None:
        """Give up the place of an adapter, whose sampler is closed; no request may name it afterwards."""
        with self._lock:
            self._adapters.forget(adapter)

    def close(self) -> None:
        """Take no more requests; those that wait fail."""
        with self._lock:
            self._closed = True
            waiting = [draw for queue in self._queues.values() for draw in queue]
            self._queues.clear()
        for draw in waiting:
            self._fail(draw, ServiceError("the service is shutting down", "server"))
        self._adapters.close()

    # ---- admission, under the lock

    def _admit(self) -> None:
        """Send what fits into the engine, tenants in fair shares."""
        while True:
            self._drop_ended()
            self._adapters.want([queue[0].request.adapter for queue in self._queues.values()])
            if self._next is not None and not self._may(self._next):  # cancelled, or its adapter has left
                self._share.charge(self._next, 0)
                self._next = None
            if self._next is None:
                ready = [tenant for tenant in self._queues if self._may(tenant)]
                if ready and not (ready := self._share.within(ready)):
                    self._look_again()
                if not ready:
                    return
                self._next = self._share.choose(ready)
            part = self._queues[self._next][0].waiting[0]
            every = self._rows.total()
            if every and every + part.samples > self._rows_of_engine:
                return  # rows are kept for it: smaller parts of others would take them one by one
            self._send(self._queues[self._next][0])
            self._next = None

    def _look_again(self) -> None:
        """Admit what quotas hold back a moment later; what runs may end before, and admit it, too."""
        if self._timer is None:
            self._timer = threading.Timer(PAUSE, self._after_pause)
            self._timer.daemon = True
            self._timer.start()

    def _after_pause(self) -> None:
        with self._lock:
            self._timer = None
            if not self._closed:
                self._admit()

    def _drop_ended(self) -> None:
        for tenant, queue in list(self._queues.items()):
            while queue and (queue[0].over or not queue[0].waiting):
                queue.popleft()
            if not queue:
                del self._queues[tenant]

    def _may(self, tenant: str) -> bool:
        """Return True if the next part of a tenant waits for nothing but free rows."""
        draw = self._queues[tenant][0] if tenant in self._queues else None
        if draw is None or not self._adapters.ready(draw.request.adapter):
            return False
        own = self._rows[tenant]
        return not own or own + draw.waiting[0].samples <= self._rows_of_engine // len(self._seen.keys() | {tenant})

    def _send(self, draw: _Draw) -> None:
        part = _Part(self, draw, draw.waiting.popleft())
        self._seen.pop(draw.tenant, None)
        self._seen[draw.tenant] = self._sent = self._sent + 1
        while self._sent - next(iter(self._seen.values())) >= _RECENT:
            del self._seen[next(iter(self._seen))]
        draw.running.append(part)
        self._adapters.use(draw.request.adapter)
        self._rows[draw.tenant] += part.samples
        self._engine.enqueue(part)

    def _leave(self, part: _Part, drawn: int = 0) -> None:
        """Note that a part is in the engine no more, and so many tokens were drawn for it."""
        draw = part.draw
        self._share.charge(draw.tenant, len(draw.request.prompt.tokens) + drawn)
        draw.running.remove(part)
        self._adapters.free(draw.request.adapter)
        self._rows[draw.tenant] -= part.samples

    # ---- events

    def ended(self, part: _Part, event: Done | Failed) -> None:
        """Take a part's end, in the engine's thread."""
        draw = part.draw
        with self._lock:
            if part not in draw.running:
                return  # cancelled
            if isinstance(event, Done):
                draw.outputs[part.number] = event.output
                self._leave(part, sum(len(one.tokens) for one in event.rollouts))
            else:
                self._leave(part)
                draw.waiting.clear()
            self._admit()
        outputs = [output for output in draw.outputs if output is not None]
        if isinstance(event, Failed):
            category = "user" if event.error.status == 400 else "server"
            self._fail(draw, ServiceError(event.error.message, category))
        elif len(outputs) == len(draw.outputs) and self._end(draw):
            rollouts = tuple(one for output in outputs for one in output.rollouts)
            scores = tuple(one for output in outputs for one in output.scores)
            joined = RequestOutput(0, rollouts, scores=scores, prompt_scores=outputs[0].prompt_scores)
            try:
                draw.future.set_result(draw.finish(joined))
            except Exception as error:
                draw.future.set_exception(error)

    def _end(self, draw: _Draw) -> bool:
        """Return True to the one who may set a request's future."""
        with self._lock:
            mine = not draw.over and draw.future.set_running_or_notify_cancel()
            draw.over = True
            return mine

    def _fail(self, draw: _Draw, error: Exception) -> None:
        if self._end(draw):
            draw.future.set_exception(error)

    def _adapter_changed(self, name: str, error: Exception | None) -> None:
        with self._lock:
            failed = [
                draw for queue in self._queues.values() for draw in queue if error and draw.request.adapter == name
            ]
            for draw in failed:
                draw.waiting.clear()
        for draw in failed:
            self._fail(draw, error if isinstance(error, ServiceError) else ServiceError(str(error), "server"))
        with self._lock:
            if not self._closed:
                self._admit()

    def _answered(self, draw: _Draw) -> None:
        """Note that nobody waits for a request: what is left of it ends."""
        with self._lock:
            draw.over = True
            self._unanswered[draw.tenant] -= 1
            draw.waiting.clear()
            for part in list(draw.running):
                self._leave(part)
                self._engine.abort(part)
            if not self._closed:
                self._admit()


def _parts(request: Request) -> list[Request]:
    """Return the requests of the engine; the first scores the prompt."""
    return [
        replace(
            request,
            samples=min(PART, request.samples - first),
            seed=derived_seed("part", request.seed, first) % _SEEDS if first else request.seed,
            prompt_scores=request.prompt_scores and not first,
        )
        for first in range(0, request.samples, PART)
    ]
