"""Prefetching of the next version during generation, so that a worker swaps weights by exchanging a pointer."""

from collections.abc import Callable
from typing import Any

from axlearn_like.run.clock import REAL, RunClock
from mesh import UserError
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.pull.receiver import VersionSource
from rl.protocol.messages import PullStats

_WAIT = 2.0  # seconds
_AGAIN = 1.0  # seconds after which a pull ahead of time is tried again


class Prefetcher:
    """Prefetcher of versions on a background thread; its methods are for the worker's thread only."""

    def __init__(
        self,
        receiver: VersionSource,
        place: Callable[[Any], Any],
        *,
        newest: bool,
        background: bool = True,
        finish: Callable[[Any], Any] = lambda placed: placed,
        clock: RunClock = REAL,
        patience: float = _WAIT,
    ):
        """Store the settings; `take` and `newer` pull.

        Args:
            receiver: pulls the versions.
            place: converts the arrays to what the engine uses (see `RolloutEngine.place`).
            newest: always fetch the newest version; else the one that follows the version in use.
            background: fetch ahead at all.
            finish: what is left to be done with the result of `place` on the worker's thread, when it takes it.
            patience: seconds that one request for newer versions waits at the directory.
        """
        self._receiver, self._place, self._newest = receiver, place, newest
        self._pulling, self._changed = clock.lock(), clock.condition()  # one pull at a time; what is ready changed
        self._ready: tuple[int, Any, PullStats] | None = None
        self._used = -1
        self._closed, self._thread, self._clock = False, None, clock
        self._background, self._finish, self._patience = background, finish, patience

    def take(self, version: int, timeout: float = 0.0) -> tuple[Any, PullStats]:
        """Return exactly this version, as the engine uses it, and figures of its pull (WeightsError: not in time)."""
        with self._pulling:
            if self._ready is None or self._ready[0] != version or not self._still_there(self._ready):
                self._hold(self._pull(version, timeout))
            assert self._ready is not None
            return self._hand_out(self._ready)

    def newer(self) -> tuple[int, Any, PullStats] | None:
        """Return a version above the one in use, if it has arrived. Never waits."""
        if not self._background:
            latest = self._receiver.directory.latest()
            if latest <= self._used:
                return None
            return (latest, *self.take(latest))
        ready = self._ready
        if ready is None or ready[0] <= self._used or not self._pulling.acquire(blocking=False):
            return None
        try:
            if self._ready is None or not self._still_there(self._ready):
                self._hold(None)
                return None
            return (self._ready[0], *self._hand_out(self._ready))
        except WeightsError:
            return None  # the next pull brings it, or the worker gets the error when it needs the version
        finally:
            self._pulling.release()

    def close(self) -> None:
        """Stop prefetching."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _hold(self, ready: tuple[int, Any, PullStats] | None) -> None:
        with self._changed:
            self._ready = ready
            self._changed.notify_all()

    def _still_there(self, ready: tuple[int, Any, PullStats]) -> bool:
        """Return False if a dead trainer published this version and its successor has not, or has published another."""
        try:
            return self._receiver.directory.manifest(ready[0]).checksum == ready[2].checksum
        except WeightsError:
            return False

    def _hand_out(self, ready: tuple[int, Any, PullStats]) -> tuple[Any, PullStats]:
        self._hold(None)
        placed = self._finish(ready[1])
        self._used = ready[0]
        if self._background and self._thread is None and not self._closed:
            self._thread = self._clock.thread(self._run, "follow")
        return placed, ready[2]

    def _pull(self, version: int, timeout: float) -> tuple[int, Any, PullStats]:
        began = self._clock()
        placed = self._place(self._receiver.pull(version, timeout))
        self._receiver.stats.seconds = self._clock() - began
        return version, placed, self._receiver.stats

    def _run(self) -> None:
        while not self._closed:
            ready = self._ready
            known = max(self._used, -1 if ready is None else ready[0])
            if ready is not None and not self._newest:
                with self._changed:  # one ahead is enough
                    self._changed.wait_for(lambda ready=ready: self._closed or self._ready is not ready)
                continue
            try:
                latest = self._receiver.directory.newer(known, self._patience)
                if latest <= known:
                    continue
                with self._pulling:
                    version = latest if self._newest else min(latest, self._used + 1)
                    if version > self._used and (self._ready is None or self._ready[0] < version):
                        self._hold(self._pull(version, _AGAIN))  # waits for a free source
            except UserError:  # wrong weights, or the parameter server is gone for good
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _AGAIN)  # the worker gets the error when it needs it
