"""Adapters of samplers in the engine, which has fewer places than there are samplers: the least recently used goes."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import RLock

from axlearn_like.layers.wrappers.adapters import Adapter
from rl.serving.engine_thread import EngineThread

_LOG = logging.getLogger(__name__)


class EngineAdapters:
    """Names that requests of the engine may give, loaded when they are wanted, in the order of the wishes.

    Methods are called under the lock of the owner. An adapter is unloaded only while no request uses it. If all are in
    use, the least recently used takes no more requests until it can go, so that no wish waits for ever.
    """

    def __init__(
        self,
        engine: EngineThread,
        places: int,
        read: Callable[[str], Adapter],
        lock: RLock,
        changed: Callable[[str, Exception | None], None],
    ):
        """Begin with an empty engine.

        Args:
            places: adapters that it holds at the same time.
            read: returns an adapter by name; it is called in a thread of its own.
            lock: guards the state of this object and of its owner.
            changed: called, without the lock, when an adapter has come, or with the error why it cannot.
        """
        self._engine, self._places, self._read = engine, places, read
        self._lock, self._changed = lock, changed
        self._users: dict[str, int] = {}  # requests in the engine by adapter, the least recently used first
        self._wishes: list[str] = []
        self._loading: set[str] = set()
        self._leaving: str | None = None
        self._loader = ThreadPoolExecutor(1, "adapters")

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names in the engine, the least recently used first."""
        return tuple(self._users)

    def ready(self, name: str | None) -> bool:
        """Return True if a request for it may go into the engine now; None is the base."""
        return name is None or (name in self._users and name != self._leaving)

    def want(self, names: Sequence[str | None]) -> None:
        """Load those of the next requests that are not there, as far as there is room."""
        missing = [name for name in names if name and name not in self._users and name not in self._loading]
        self._wishes = [*(name for name in self._wishes if name in missing), *missing]
        for name in dict.fromkeys(self._wishes):
            if len(self._users) + len(self._loading) >= self._places and not self._make_room(names):
                return
            self._loading.add(name)
            self._loader.submit(self._load, name)
        self._leaving = None

    def use(self, name: str | None) -> None:
        """Count a request that goes into the engine."""
        if name is not None:
            self._users[name] = self._users.pop(name) + 1

    def free(self, name: str | None) -> None:
        """Count a request that has left the engine."""
        if name is not None:
            self._users[name] -= 1

    def forget(self, name: str) -> None:
        """Let an adapter that nobody wants any more be the first to go."""
        if name in self._users:
            self._users = {name: self._users.pop(name), **self._users}

    def close(self) -> None:
        """End the thread that reads."""
        self._loader.shutdown(wait=True, cancel_futures=True)

    def _make_room(self, wanted: Sequence[str | None]) -> bool:
        """Unload one that is idle and not wanted next; else choose one that takes no more requests until it is."""
        held = {name for name in wanted if name != self._leaving}
        idle = [name for name, users in self._users.items() if not users and name not in held]
        if not idle:
            if self._leaving is None:
                self._leaving = next((name for name, users in self._users.items() if users), None)
            return False
        leaving = self._leaving if self._leaving in idle else idle[0]
        del self._users[leaving]
        self._leaving = None
        self._engine.unload_adapter(leaving)
        return True

    def _load(self, name: str) -> None:
        try:
            future = self._engine.load_adapter(name, self._read(name))
        except Exception as error:
            return self._loaded(name, error)
        future.add_done_callback(lambda done: self._loaded(name, _error(done)))

    def _loaded(self, name: str, error: Exception | None) -> None:
        with self._lock:
            self._loading.discard(name)
            if error is None:
                self._users[name] = 0
            else:
                _LOG.warning("adapter %r cannot be loaded: %s", name, error)
        self._changed(name, error)


def _error(done: Future[None]) -> Exception | None:
    error = done.exception()
    return error if error is None or isinstance(error, Exception) else RuntimeError(str(error))
