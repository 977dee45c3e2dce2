"""Promises: results that a client was told it will get, by an id that it may ask for until it has the answer.

The id is `{model or sampler}:{seq}`, by which the service recalls what it has accepted: a repeated request has the
promise of the first one, and a service that was killed and started again gives the same answers.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from rl.serving.errors import ApiError
from rl.serving.service.messages import Outcome, Refusal, ServiceBusy, ServiceError, UnknownId
from rl.serving.service.service import AdapterService

_KEPT = 2000  # futures of a tenant that the service does not recall: refused creations and samples, ends of models


class PromiseGone(ServiceError):
    """A promise of samples that the service no longer has; the same request may come again."""


class Promises:
    """Promises of all tenants; for use in one event loop."""

    def __init__(self, service: AdapterService, hold: float = 40.0):
        """`hold`: seconds that a question waits for an answer."""
        self._service, self._hold = service, hold
        self._others: dict[str, dict[str, Future[Any]]] = {}  # futures by tenant and id

    async def accept(self, tenant: str, owner: str, seq: int | str, start: Callable[[], Future[Any]]) -> str:
        """Return the id of a request's promise; `start` begins the work, in another thread.

        A request that cannot be read, or is refused, has its error for its outcome: a client learns of it where it
        waits for the result, and the number that a model has for it is spent.

        Raises:
            ServiceBusy: it is not accepted, and may come again.
            UnknownId: the owner is not there.
        """
        id = f"{owner}:{seq}"
        future = await asyncio.to_thread(self._begin, tenant, owner, seq, start)
        others = self._others.setdefault(tenant, {})
        others.pop(id, None)
        if future is not None:
            others[id] = future
            if len(others) > _KEPT:
                del others[next(iter(others))]
        return id

    async def wait(self, tenant: str, id: str) -> Outcome | ServiceError | None:
        """Return an outcome, or the error to tell; None if there is none yet after some seconds.

        Raises:
            UnknownId: the tenant has no promise of this id.
            PromiseGone: it had one of samples, which are drawn again if the client asks for them.
        """
        future = self._find(tenant, id)
        finished = asyncio.wrap_future(future)
        finished.add_done_callback(lambda done: done.cancelled() or done.exception())  # errors are read below
        await asyncio.wait((finished,), timeout=self._hold)
        if not future.done():
            return None
        try:
            return future.result()
        except ServiceError as error:
            return error
        except CancelledError:
            return ServiceError("the request was cancelled")
        except Exception as error:
            return ServiceError(f"the service failed: {type(error).__name__}: {error}", "server")

    def cancel(self, tenant: str, id: str) -> None:
        """Cancel a promise of samples; no effect on any other, which may change a model, or on one that is unknown."""
        if ":sample:" in id:
            try:
                self._find(tenant, id).cancel()
            except (UnknownId, PromiseGone):
                pass

    def _begin(self, tenant: str, owner: str, seq: int | str, start: Callable[[], Future[Any]]) -> Future[Any] | None:
        """Start a request; returns its future if the service will not recall it."""
        try:
            future = start()
        except ServiceBusy:
            raise
        except (ServiceError, ApiError) as error:
            wrong = error if isinstance(error, ServiceError) else ServiceError(error.message)
            if isinstance(seq, int) and seq and ":train:" in owner:
                self._service.submit(tenant, owner, seq, Refusal(str(wrong), wrong.category))
                return None
            future = Future()
            future.set_exception(wrong)
            return future
        return None if isinstance(seq, int) else future

    def _find(self, tenant: str, id: str) -> Future[Any]:
        if (other := self._others.get(tenant, {}).get(id)) is not None:
            return other
        owner, _, number = id.rpartition(":")
        numbered = number.isdecimal() and len(number) < 20
        future = self._service.recall(tenant, owner, int(number)) if numbered else None
        if future is not None:
            return future
        if numbered and ":sample:" in owner:
            raise PromiseGone("these samples are no longer kept; ask for them again")
        raise UnknownId("promise", id)
