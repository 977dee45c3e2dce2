"""A publication in progress."""

import threading
from collections.abc import Callable

from rl.parameter_server.push.snapshot import Snapshot


class Push:
    """Publication of one version in progress, on a thread of its own."""

    def __init__(
        self,
        snapshot: Snapshot,
        publish: Callable[[Snapshot], None],
        then: Callable[[Snapshot], None],
        on_end: Callable[[], None],
    ):
        """Start. `then` is part of the publication, which fails with it; `on_end` is called in any case."""
        self._snapshot = snapshot
        self._ended = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(publish, then, on_end), daemon=True).start()

    def snapshot(self) -> Snapshot:
        """Wait until the host copy is complete and return it."""
        return self._snapshot.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Return True if the version is published within so many seconds (None: no limit). Raises its error."""
        ended = self._ended.wait(timeout)
        if self._error is not None:
            raise self._error
        return ended

    def _run(
        self, publish: Callable[[Snapshot], None], then: Callable[[Snapshot], None], on_end: Callable[[], None]
    ) -> None:
        try:
            publish(self._snapshot)
            then(self._snapshot)
        except BaseException as error:  # raised by `wait`
            self._error = error
        finally:
            self._ended.set()
            on_end()
