"""Shared memory for the next version, reserved while nothing waits for it.

The kernel provides a new segment page by page, zeroed, which takes longer than to fill it. Segments are not used again:
the processes that map one do not say when they have done with it.
"""

import threading

from mesh import UserError
from rl.parameter_server.transport.shared_memory import SharedSegment, free_memory

# Seconds after a publication: first its readers have use for the processor, and the shard server must have dropped what
# it evicted (`_SWEEP_DELAY` in server.py), whose memory counts as free by then.
_DELAY = 1.0


class NextSegment:
    """Source of segments: one of the size last asked for is kept ready. Thread-safe."""

    def __init__(self, delay: float = _DELAY):
        """`delay`: seconds from `prepare` to the reservation."""
        self._delay, self._lock = delay, threading.Lock()
        self._nbytes = 0  # asked for last
        self._ready: SharedSegment | None = None
        self._timer: threading.Timer | None = None

    def take(self, nbytes: int) -> SharedSegment | None:
        """Return a segment, the one that is ready if it has this size; None if there is too little free memory."""
        with self._lock:  # one that is being reserved will be ready sooner than another
            if self._timer is not None:
                self._timer.cancel()
            ready, self._ready, self._nbytes = self._ready, None, nbytes
        return ready if ready is not None and ready.nbytes == nbytes else _segment(nbytes)

    def prepare(self) -> None:
        """Reserve the next segment in a while, unless `take` is called before, or memory for two is not free by then.

        It is held through the next update, which must have room beside it, as it had without.
        """
        with self._lock:
            if self._nbytes and self._ready is None:
                self._timer = threading.Timer(self._delay, self._reserve)
                self._timer.daemon = True
                self._timer.start()

    def _reserve(self) -> None:
        with self._lock:
            timer = self._timer
            if timer is not None and timer is threading.current_thread() and not timer.finished.is_set():
                self._ready = _segment(self._nbytes) if free_memory() >= 2 * self._nbytes else None


def _segment(nbytes: int) -> SharedSegment | None:
    try:
        return SharedSegment.create(nbytes)
    except UserError:
        return None  # the data goes over the socket then
