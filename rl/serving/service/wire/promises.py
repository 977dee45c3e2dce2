"""Promises: results that a client was told it will get, by an id that it may ask for until it has the answer.

The id is `{model or sampler}:{seq}`, so that a repeated request has the promise of the first one, and a service that
was killed and started again finds what it had accepted.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from rl.serving.errors import ApiError
from rl.serving.service.messages import Outcome, Refusal, ServiceBusy, ServiceError, UnknownId
from rl.serving.service.service import AdapterService

_KEPT_ANSWERED = 300.0  # seconds that an answer stays for a client whose connection broke while it was sent
_KEPT = 3600.0  # seconds that an answer waits for a client that does not ask


class PromiseGone(ServiceError):
    """A promise of samples that the service no longer has; the same request may come again."""


@dataclasses.dataclass(eq=False)
class Promise:
    """An accepted request, and its outcome when there is one.

    Attributes:
        id: `{model or sampler}:{seq}`.
        future: outcome of the work.
        finished: set in the event loop when the future is done.
        since: seconds of the monotonic clock when it was made, finished or answered last.
        answered: the client has been sent the outcome.
    """

    id: str
    tenant: str
    future: Future[Any]
    finished: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    since: float = dataclasses.field(default_factory=time.monotonic)
    answered: bool = False

    def outcome(self) -> Outcome | ServiceError:
        """Return the outcome of a finished promise, or the error to tell."""
        try:
            return self.future.result(0)
        except ServiceError as error:
            return error
        except CancelledError:
            return ServiceError("the request was cancelled")
        except Exception as error:
            return ServiceError(f"the service failed: {type(error).__name__}: {error}", "server")

    def sent(self) -> None:
        """Note that the client was sent the outcome."""
        self.answered, self.since = True, time.monotonic()


class Promises:
    """Promises of all tenants; for use in one event loop."""

    def __init__(self, service: AdapterService, most_per_tenant: int = 10_000, hold: float = 40.0):
        """`most_per_tenant`: promises that a tenant may have; `hold`: seconds that a question waits for an answer."""
        self._service, self._most, self._hold = service, most_per_tenant, hold
        self._all: dict[tuple[str, str], Promise] = {}
        self._counts: dict[str, int] = {}

    async def accept(self, tenant: str, owner: str, seq: int | str, start: Callable[[], Future[Any]]) -> Promise:
        """Return the promise of a request; if it is new, `start` begins the work, in another thread.

        A request that cannot be read, or is refused, has its error for its outcome: a client learns of it where it
        waits for the result, and the number that a model has for it is spent.

        Raises:
            ServiceBusy: it is not accepted, and may come again.
            UnknownId: the owner is not there.
        """
        id = f"{owner}:{seq}"
        if (known := self._all.get((tenant, id))) is not None:
            return known
        self._forget_old(tenant)
        if self._counts.get(tenant, 0) >= self._most:
            raise ServiceBusy(f"{self._most} requests of yours have no answer yet, or wait to be asked for")
        future = await asyncio.to_thread(self._begin, tenant, owner, seq, start)
        return self._all.get((tenant, id)) or self._add(tenant, id, future)

    async def wait(self, tenant: str, id: str) -> Promise | None:
        """Return a promise that has its outcome; None if it has none yet after some seconds.

        Raises:
            UnknownId: the tenant has no promise of this id.
            PromiseGone: it had one of samples, which are drawn again if the client asks for them.
        """
        promise = self._all.get((tenant, id)) or self._recall(tenant, id)
        try:
            await asyncio.wait_for(promise.finished.wait(), self._hold)
        except TimeoutError:
            return None
        return promise

    def cancel(self, tenant: str, id: str) -> None:
        """Cancel a promise of samples; no effect on any other, which may change a model, or on one that is unknown."""
        promise = self._all.get((tenant, id))
        if promise is not None and ":sample:" in id:
            promise.future.cancel()

    def _begin(self, tenant: str, owner: str, seq: int | str, start: Callable[[], Future[Any]]) -> Future[Any]:
        try:
            return start()
        except ServiceBusy:
            raise
        except (ServiceError, ApiError) as error:
            wrong = error if isinstance(error, ServiceError) else ServiceError(error.message)
        if isinstance(seq, int) and seq and ":train:" in owner:
            return self._service.submit(tenant, owner, seq, Refusal(str(wrong), wrong.category))
        failed: Future[Any] = Future()
        failed.set_exception(wrong)
        return failed

    def _add(self, tenant: str, id: str, future: Future[Any]) -> Promise:
        promise = self._all[tenant, id] = Promise(id, tenant, future)
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        loop = asyncio.get_running_loop()

        def finish() -> None:
            promise.since = time.monotonic()
            promise.finished.set()

        def done(_: Future[Any]) -> None:
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:
                pass  # the loop is closed

        future.add_done_callback(done)
        return promise

    def _recall(self, tenant: str, id: str) -> Promise:
        """Return the promise of work that was accepted before it was forgotten here, or before a restart."""
        owner, _, number = id.rpartition(":")
        future = self._service.recall(tenant, owner, int(number)) if number.isdecimal() and len(number) < 20 else None
        if future is not None:
            return self._add(tenant, id, future)
        if number.isdecimal() and ":sample:" in owner:
            raise PromiseGone("these samples are no longer kept; ask for them again")
        raise UnknownId("promise", id)

    def _forget_old(self, tenant: str) -> None:
        """Drop finished promises that were kept long enough; answered ones at once where a tenant has too many."""
        now, crowded = time.monotonic(), self._counts.get(tenant, 0) >= self._most
        for key, promise in list(self._all.items())[: None if crowded else 64]:
            if not promise.finished.is_set():
                continue
            age = now - promise.since
            old = age > (_KEPT_ANSWERED if promise.answered else _KEPT)
            if old or (crowded and promise.answered and promise.tenant == tenant):
                del self._all[key]
                self._counts[promise.tenant] -= 1
