"""SIGTERM to a role's process (a spot notice, or somebody takes it away): hand back, save, exit 0 within the grace."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from axlearn_like.run.disk import DiskFull
from axlearn_like.run.events import EventLog

_LAST_WORDS = 3.0  # seconds for what is done when there is no more time
_REPLY = 0.5  # seconds in which the caller gets the last answer


class GracefulShutdown:
    """Whether this process was asked to leave, and its end. Made by the process's main thread.

    A loop reads `requested` and calls `done` when it has put everything in order. If it has not within `grace` seconds,
    `abandon` is called, and the process ends all the same. Without a loop there is nothing to put in order.
    """

    def __init__(
        self, name: str, events: EventLog, grace: float, signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    ):
        self._name, self._events, self._grace = name, events, grace
        self._asked = 0.0
        self._settled = threading.Lock()
        self.abandon: Callable[[], object] = lambda: None
        self.has_loop = True
        for signum in signals:
            signal.signal(signum, self._on_signal)

    @property
    def requested(self) -> bool:
        return self._asked > 0

    def done(self, **fields: Any) -> None:
        """Everything is in order: write it down, and end the process as soon as the caller has its answer."""
        if self._settled.acquire(blocking=False):
            self._note(**fields)
            self._end(_REPLY)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested:
            return  # schedulers repeat it
        self._asked = time.monotonic()
        if self.has_loop:
            self._later(self._grace, self._give_up)
        else:
            self.done()

    def _give_up(self) -> None:
        if not self._settled.acquire(blocking=False):
            return
        last_words = threading.Thread(target=self.abandon, daemon=True)
        last_words.start()
        last_words.join(_LAST_WORDS)
        self._note(abandoned=True)
        self._end(0.0)

    def _note(self, **fields: Any) -> None:
        with contextlib.suppress(DiskFull):
            self._events.append(self._name, "shutdown", pid=os.getpid(), seconds=self._seconds(), **fields)

    def _end(self, after: float) -> None:
        self._later(after, lambda: os._exit(0))  # an ordinary exit would have Ray's threads wait for each other

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, what)
        timer.daemon = True
        timer.start()

    def _seconds(self) -> float:
        return round(time.monotonic() - self._asked, 3)
