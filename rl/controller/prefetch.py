"""Work of the controller that is done ahead of time, in a thread of its own, outside the controller's lock."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

__all__ = ["Prefetch"]

_POLL = 0.2  # seconds after which a wait looks whether it is still wanted


class Prefetch[K: Hashable, V]:
    """Results of a pure function by key: those wanted soon are made ahead, in order, by one thread. Thread-safe.

    The thread ends when nothing is left to do, and never keeps the interpreter from ending.
    """

    def __init__(self, make: Callable[[K], V]):
        self._make = make
        self._changed = threading.Condition()
        self._queue: OrderedDict[K, None] = OrderedDict()  # the next to make first
        self._made: dict[K, V | BaseException] = {}
        self._making: K | None = None
        self._alive = False

    def want(self, keys: Iterable[K]) -> None:
        """Make these ahead of time, unless they are there."""
        with self._changed:
            self._queue.update((key, None) for key in keys if key not in self._made and key != self._making)
            self._start()

    def ready(self, key: K) -> bool:
        """Return True if `get` does not wait."""
        return key in self._made

    def get(self, key: K, stopped: Callable[[], bool] = lambda: False) -> V | None:
        """Return the result, made next if it is not there; None if `stopped` before that. Raises what making it did."""
        with self._changed:
            while key not in self._made:
                if stopped():
                    return None
                if key != self._making:
                    self._queue[key] = None
                    self._queue.move_to_end(key, last=False)
                self._start()
                self._changed.wait(_POLL)
            found = self._made[key]
        if isinstance(found, BaseException):
            raise found
        return found

    def keep(self, wanted: Callable[[K], bool]) -> None:
        """Forget what is not wanted any more."""
        with self._changed:
            self._queue = OrderedDict((key, None) for key in self._queue if wanted(key))
            self._made = {key: value for key, value in self._made.items() if wanted(key)}

    def _start(self) -> None:
        if self._queue and not self._alive:
            self._alive = True
            threading.Thread(target=self._run, name="prefetch", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._making = None
                if not self._queue:
                    self._alive = False
                    return
                key, _ = self._queue.popitem(last=False)
                self._making = key
            try:
                made: V | BaseException = self._make(key)
            except BaseException as error:  # `get` raises it
                made = error
            with self._changed:
                self._made[key] = made
                self._changed.notify_all()
