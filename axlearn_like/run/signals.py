"""Graceful shutdown: SIGTERM and the first Ctrl-C ask a loop to stop at its next safe point."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stop:
    """A request to stop, and the signal that made it."""

    def __init__(self) -> None:
        self._signal: int | None = None

    @property
    def requested(self) -> bool:
        """True once a stop was requested."""
        return self._signal is not None

    @property
    def reason(self) -> str | None:
        """The signal's name ("SIGTERM", "SIGINT"), or None."""
        return None if self._signal is None else signal.Signals(self._signal).name

    def request(self, signum: int = signal.SIGTERM) -> None:
        """Request the stop as the signal would."""
        self._signal = signum


_active: list[Stop] = []  # stops of the main thread, outermost first


@contextmanager
def graceful_stop() -> Iterator[Stop]:
    """Turn SIGTERM and SIGINT into a flag that a loop reads; afterwards the old handlers return.

    A second Ctrl-C raises KeyboardInterrupt at once. Further SIGTERMs change nothing: schedulers repeat them, and they
    would interrupt the save that they ask for. Outside the main thread Python allows no handlers, so there the flag is
    set only by `stop.request()`.

    Blocks may be nested, as a phase within a run: the signal stops all of them.
    """
    stop = Stop()

    def handle(signum: int, frame: FrameType | None) -> None:
        if stop.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        for active in _active:
            active.request(signum)

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        if _active:
            stop._signal = _active[-1]._signal
        _active.append(stop)
        for signum in (signal.SIGTERM, signal.SIGINT):
            previous[signum] = signal.signal(signum, handle)
    try:
        yield stop
    finally:
        if previous:
            _active.remove(stop)
        for signum, handler in previous.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
