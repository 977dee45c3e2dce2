"""The engine in a thread of its own: requests go in by a queue, tokens come back into the event loop that asked.

Everything that touches the engine runs in that thread, between two of its steps. A request that the engine refuses or
ends with an error ends alone. If a step itself fails, nothing is known about the state of the unfinished requests: they
fail, and the engine goes on with an empty cache. Only if it cannot, no more are accepted.
"""

import abc
import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import override

import numpy as np

from axlearn_like.layers.base import Params
from axlearn_like.layers.wrappers.adapters import Adapter
from mesh import UserError
from rl.protocol.messages import Rollout
from rl.rollout.decoding.scores import TokenScores
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, RequestOutput
from rl.serving.errors import ApiError


@dataclass(frozen=True, slots=True)
class NewTokens:
    """More tokens int32[k] of a sample of request `index`, with their log-probabilities float32[k], and scores."""

    index: int
    sample: int
    tokens: np.ndarray
    logprobs: np.ndarray
    scores: TokenScores | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """All samples of request `index`, whole."""

    index: int
    output: RequestOutput

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """The samples, in order."""
        return self.output.rollouts


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of the whole stream, for this reason."""

    error: ApiError


Event = NewTokens | Done | Failed
_LOG = logging.getLogger(__name__)


class EventReceiver(abc.ABC):
    """Requests that go into the engine together, and the place where their events go. Nothing follows a `Failed`."""

    def __init__(self, requests: Sequence[Request]):
        self.requests = tuple(requests)
        self.over = False  # aborted: no event may follow

    @abc.abstractmethod
    def post(self, events: Sequence[Event]) -> None:
        """Take events, in the engine's thread: return soon, and never raise."""


class Stream(EventReceiver):
    """Events of the requests of one `submit`, for the event loop that made it."""

    def __init__(self, requests: Sequence[Request]):
        super().__init__(requests)
        self.begun = False  # an event has arrived
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def next(self) -> Event:
        """Wait for the next event."""
        return await self._events.get()

    @override
    def post(self, events: Sequence[Event]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, events)
        except RuntimeError:
            pass  # the loop is closed

    def _take(self, events: Sequence[Event]) -> None:
        self.begun = True
        for event in events:
            self._events.put_nowait(event)


class EngineThread:
    """Owner of an engine from `start` to `close`. Any thread may call its methods, `submit` from an event loop."""

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[
            int, tuple[EventReceiver, int]
        ] = {}  # engine's number -> (stream, index of the request in it)
        self._outbox: dict[EventReceiver, list[Event]] = {}
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: BaseException | None = None
        self.version = engine.version
        self.stats = engine.stats()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while requests are accepted."""
        return self._thread.is_alive() and self.failure is None

    # ---- calls

    def submit(self, requests: Sequence[Request]) -> Stream:
        """Queue requests; all of them, or if the engine refuses one, none."""
        stream = Stream(requests)
        self.enqueue(stream)
        return stream

    def enqueue(self, receiver: EventReceiver) -> None:
        """Queue the requests of a receiver likewise, from any thread."""
        self._calls.put(lambda: self._submit(receiver))

    def abort(self, stream: EventReceiver) -> None:
        """End a stream's requests; no event follows. No effect on a stream that has ended."""
        self._calls.put(lambda: self._abort(stream))

    def abort_all(self, why: ApiError) -> None:
        """End every stream with this error."""
        self._calls.put(lambda: self._fail_all(why))

    def set_weights(self, params: Params, version: int) -> Future[None]:
        """Swap the weights between two steps; requests continue under the new ones."""
        return self._call(lambda: self._set_weights(params, version))

    def load_adapter(self, name: str, adapter: Adapter) -> Future[None]:
        """Load an adapter between two steps, or replace the one of this name."""
        return self._call(lambda: self._engine.load_adapter(name, adapter))

    def unload_adapter(self, name: str) -> Future[None]:
        """Take no more requests for an adapter; unfinished ones keep it."""
        return self._call(lambda: self._engine.unload_adapter(name))

    def pause(self) -> Future[None]:
        """Make no more steps until `resume`; requests queue up."""
        return self._call(partial(setattr, self, "_paused", True))

    def resume(self) -> Future[None]:
        """End a pause."""
        return self._call(partial(setattr, self, "_paused", False))

    def close(self, timeout: float = 10.0) -> None:
        """End the thread after the current step; unfinished requests fail."""
        self.abort_all(ApiError(503, "the server is shutting down", code="shutting_down"))
        self._calls.put(None)
        if self._thread.ident is not None:  # thread was started
            self._thread.join(timeout)

    # ---- in the thread

    def _run(self) -> None:
        while self._run_calls():
            if self._has_work():
                self._step()
            if self.failure is None:
                self.stats = self._engine.stats()

    def _has_work(self) -> bool:
        return self._engine.busy and not self._paused and self.failure is None

    def _run_calls(self) -> bool:
        """Run the queued calls or, with nothing else to do, wait for the next; returns False at the end."""
        wait = not self._has_work()
        while True:
            try:
                call = self._calls.get(block=wait)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            wait = False

    def _step(self) -> None:
        try:
            finished = self._engine.step()
        except Exception as error:
            return self._recover(error)
        for item in finished:
            stream, index = self._running.pop(item.number, (None, 0))
            if stream is None:
                continue  # request was aborted
            if item.error is None:
                self._outbox.setdefault(stream, []).append(Done(index, item))
            else:
                self._post()
                self._fail(stream, ApiError(500, item.error, code="generation_failed"))
        self._post()

    def _recover(self, error: Exception) -> None:
        """Fail all requests, and go on with an empty cache."""
        _LOG.exception("a step of the engine failed; so did %d requests", len(self._running))
        owners = {id(stream): stream for stream, _ in self._running.values()}
        self._running.clear()
        try:
            self._engine.reset()
        except Exception as again:
            _LOG.exception("the engine cannot go on")
            self.failure = again
        self._post()
        for stream in owners.values():
            said = f"the engine failed: {type(error).__name__}: {error}"
            self._fail(stream, ApiError(500, said, code="engine_failed"))

    def _submit(self, stream: EventReceiver) -> None:
        if self.failure is not None:
            stream.post([Failed(ApiError(503, "the engine has failed", code="engine_failed"))])
            return
        for index, request in enumerate(stream.requests):
            try:
                number = self._engine.submit(request, on_tokens=partial(self._on_tokens, stream, index))
            except UserError as error:
                self._fail(stream, ApiError(400, str(error), code="refused"))
                return
            except Exception as error:
                _LOG.exception("a request could not be queued")
                said = f"the engine failed: {type(error).__name__}: {error}"
                self._fail(stream, ApiError(500, said, code="engine_failed"))
                return
            self._running[number] = stream, index

    def _on_tokens(
        self,
        stream: EventReceiver,
        index: int,
        sample: int,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        scores: TokenScores | None,
    ) -> None:
        if stream.over:
            return
        # Copies: the engine may hand out views of its buffers.
        event = NewTokens(index, sample, np.array(tokens, np.int32), np.array(logprobs, np.float32), scores)
        self._outbox.setdefault(stream, []).append(event)

    def _post(self) -> None:
        """Make one call into the event loop for all events of a stream."""
        for stream, events in self._outbox.items():
            stream.post(events)
        self._outbox.clear()

    def _abort(self, stream: EventReceiver) -> None:
        stream.over = True
        for number in [number for number, (owner, _) in self._running.items() if owner is stream]:
            del self._running[number]
            if self.failure is None:
                self._engine.abort(number)
        self._outbox.pop(stream, None)

    def _fail(self, stream: EventReceiver, error: ApiError) -> None:
        self._abort(stream)
        stream.post([Failed(error)])

    def _fail_all(self, error: ApiError) -> None:
        self._post()
        for stream in {id(stream): stream for stream, _ in self._running.values()}.values():
            self._fail(stream, error)

    def _set_weights(self, params: Params, version: int) -> None:
        self._engine.set_weights(params, version)
        self.version = version

    def _call(self, function: Callable[[], object]) -> Future[None]:
        """Queue a call whose end, or error, the caller can wait for."""
        future: Future[None] = Future()

        def call() -> None:
            try:
                function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._calls.put(call)
        return future
