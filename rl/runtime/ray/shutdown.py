"""Graceful shutdown of a role: on SIGTERM it hands back or saves its work, and exits with status 0 within the grace.

SIGTERM is what a spot notice or a scheduler sends.
"""

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

_ABANDON_TIMEOUT = 3.0  # seconds for `abandon`, which runs when the grace is over
_REPLY = 0.5  # seconds in which the caller gets the last answer


class GracefulShutdown:
    """Handler of SIGTERM for this process; create it on the main thread.

    A loop reads `requested`, and calls `done` when its work is handed back or saved. If it has not done so within
    `grace` seconds, `abandon` is called and the process ends. Without a loop the process ends at once.
    """

    def __init__(
        self, name: str, events: EventLog, grace: float, signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    ):
        self.name, self._events, self._grace = name, events, grace
        self._requested_at = 0.0
        self._ending = threading.Lock()
        self.abandon: Callable[[], object] = lambda: None
        self.has_loop = True
        for signum in signals:
            signal.signal(signum, self._on_signal)

    @property
    def requested(self) -> bool:
        """True once a signal has come."""
        return self._requested_at > 0

    def done(self, **fields: Any) -> None:
        """Log an event `shutdown` with these fields, and end the process as soon as the caller has its answer."""
        if self._ending.acquire(blocking=False):
            self._log(**fields)
            self._exit(_REPLY)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested:
            return  # schedulers repeat it
        self._requested_at = time.monotonic()
        if self.has_loop:
            self._after(self._grace, self._give_up)
        else:
            self.done()

    def _give_up(self) -> None:
        if not self._ending.acquire(blocking=False):
            return
        abandoning = threading.Thread(target=self.abandon, daemon=True)
        abandoning.start()
        abandoning.join(_ABANDON_TIMEOUT)
        self._log(abandoned=True)
        self._exit(0.0)

    def _log(self, **fields: Any) -> None:
        seconds = round(time.monotonic() - self._requested_at, 3)
        with contextlib.suppress(DiskFull):
            self._events.append(self.name, "shutdown", pid=os.getpid(), seconds=seconds, **fields)

    def _exit(self, after: float) -> None:
        self._after(after, lambda: os._exit(0))  # ordinary exit: Ray's threads would wait for each other

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()
