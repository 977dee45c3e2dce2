"""The clock of a role: all that the control plane knows of time, so that a simulation can put its own in its place."""

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["REAL", "RunClock", "condition_of"]


class RunClock:
    """Real time, and what waits by it: sleeps, conditions, locks, timers and threads.

    A clock is called for its seconds, so that a plain function can stand for it where nothing waits.
    """

    def __call__(self) -> float:
        """Return seconds that only grow, from any origin."""
        return time.monotonic()

    def wall(self) -> float:
        """Return the seconds since 1970."""
        return time.time()

    def cpu(self) -> float:
        """Return the CPU seconds that this process has used, on all cores together."""
        return time.process_time()

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        time.sleep(seconds)

    def condition(self) -> threading.Condition:
        """Return a new condition, with a lock of its own."""
        return threading.Condition()

    def lock(self) -> Any:
        """Return a new lock that is held while time passes."""
        return threading.Lock()

    def timer(self, seconds: float, call: Callable[[], None]) -> Any:
        """Call a function once, so many seconds from now; returns what has `cancel` and `is_alive`."""
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()
        return timer

    def thread(self, target: Callable[[], None], name: str) -> Any:
        """Start a thread that does not keep the process alive; returns what has `is_alive`."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread


REAL = RunClock()


def condition_of(clock: Callable[[], float]) -> threading.Condition:
    """Return a new condition of a clock; of a plain function, which gives nothing but the time, a real one."""
    return clock.condition() if isinstance(clock, RunClock) else threading.Condition()
