"""The thread of an episode: calls of its environment, one at a time, and its end."""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from rl.environments.environment import Environment

Call = Callable[[Environment], Any]


class EnvironmentThread:
    """Thread that makes an environment, calls it, and closes it; coroutines run on an event loop of its own.

    A call that never returns keeps the thread for itself: the caller stops waiting (`Wait.seconds`), the thread is
    abandoned, and should the call return after all, the environment is closed then.
    """

    def __init__(self, make: Callable[[], Environment], deadline_s: float, name: str):
        """Start the thread; the first call makes the environment. `deadline_s`: seconds of a coroutine."""
        self._make, self._deadline_s = make, deadline_s
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Call, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, call: Call) -> Future[Any]:
        """Queue a call; the future has its result, a coroutine's awaited."""
        future: Future[Any] = Future()
        self._jobs.put((future, call, time.monotonic()))
        return future

    def close(self) -> None:
        """Close the environment after the call in hand, and end the thread; returns at once."""
        self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Wait until the thread has ended; returns False if it has not."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        environment: Environment | None = None
        with asyncio.Runner() as runner:
            while (job := self._jobs.get()) is not None:
                future, call, asked = job
                try:
                    if environment is None:
                        environment = self._make()
                    environment.asked = asked
                    result = self._result(call(environment), runner)
                except BaseException as error:  # SystemExit too: a tool's exit must not be the worker's
                    future.set_exception(error)
                else:
                    future.set_result(result)
            if environment is not None:
                try:
                    self._result(environment.close(), runner)
                except BaseException:  # episode is over and recorded
                    return

    def _result(self, value: Any, runner: asyncio.Runner) -> Any:
        return runner.run(self._limited(value)) if isinstance(value, Awaitable) else value

    async def _limited(self, value: Awaitable[Any]) -> Any:
        limit = asyncio.timeout(self._deadline_s)
        try:
            async with limit:
                return await value
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(f"not done after {self._deadline_s:g} s") from error
            raise
