"""Sweeps of the shard servers: what belongs to no version is dropped."""

from collections.abc import Callable, Sequence, Set
from typing import Any

from axlearn_like.run.clock import RunClock
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.store.shard_server import ShardServer


class Sweeper:
    """Sweeps of shard servers, which drop the keys that nobody uses, some time after a publication."""

    def __init__(
        self, servers: Sequence[ShardServer], used: Callable[[], Set[int]], lock: Any, delay: float, clock: RunClock
    ):
        """Store the settings; `used`: gives keys to keep, under the lock; `delay`: seconds to a sweep, 0: none."""
        self._servers, self._used, self._lock = servers, used, lock
        self._delay, self._clock = delay, clock
        self._timer: Any = None

    def soon(self) -> None:
        """Sweep after the delay; at once if pushes overlap, so that the last one was not swept for yet."""
        with self._lock:
            late = self._cancel()
            if self._delay and not late:
                self._timer = self._clock.timer(self._delay, self.sweep)
                return
        self.sweep()

    def finish(self) -> None:
        """Sweep now if a delayed sweep is due."""
        with self._lock:
            late = self._cancel()
        if late:
            self.sweep()

    def sweep(self) -> None:
        """Let shard servers drop what belongs to no version, held or in progress. Dead ones have nothing to drop.

        Each is asked first what it holds: a key that is opened in the meantime is not in its answer, however long it
        takes to drop.
        """
        for server in self._servers:
            try:
                held = server.keys()
                with self._lock:
                    used = self._used()
                if gone := [key for key in held if key not in used]:
                    server.drop(gone)
            except WeightsError:
                continue

    def _cancel(self) -> bool:
        """Cancel the delayed sweep; return True if there was one that has not ended."""
        due, self._timer = self._timer, None
        if due is None or not due.is_alive():
            return False
        due.cancel()
        return True
