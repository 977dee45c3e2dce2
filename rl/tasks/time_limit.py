"""A time limit for Python code in a thread: what a generator of problems may take.

The exception is raised between two bytecodes of the thread (CPython's `PyThreadState_SetAsyncExc`), so an endless loop
ends; a call into C that does not return is interrupted when it does.
"""

import ctypes
import threading
from collections.abc import Callable


class TookTooLong(BaseException):
    """The time is over. Not an `Exception`: the code that is interrupted should not catch it."""


def limited[T](function: Callable[[], T], seconds: float) -> T:
    """Return what a function returns within so many seconds; 0 or less: at any time (TookTooLong)."""
    if seconds <= 0:
        return function()
    limit = _Limit(threading.get_ident())
    timer = threading.Timer(seconds, limit.expire)
    timer.daemon = True
    try:
        timer.start()
        return function()
    finally:
        timer.cancel()
        limit.end()


class _Limit:
    """One call under a limit; the exception never arrives after `end`."""

    def __init__(self, thread: int):
        self._thread, self._lock, self._over, self._sent = thread, threading.Lock(), False, False

    def expire(self) -> None:
        """Interrupt the call."""
        with self._lock:
            if not self._over:
                self._sent = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(TookTooLong))

    def end(self) -> None:
        """Mark the call as over; an exception that is on its way is taken back, or goes up from here."""
        with self._lock:
            self._over, sent = True, self._sent
        if sent:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), None)  # one not yet raised
