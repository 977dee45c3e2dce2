"""Heartbeats of all workers, elastic or not.

A worker without one was killed, stopped or cut off: the controller gives its lease to a worker that asks for one.
"""

import threading
from typing import Any

import ray

from rl.runtime.ray.proxies import invoke_beside

_HEARTBEAT = 0.5  # seconds between two heartbeats


class Heartbeat:
    """A thread that tells the controller's actor twice a second that this process lives; a context manager.

    One call is under way at a time, so that none pile up while the controller cannot be reached. The worker's own calls
    cannot tell it: compiling a program takes minutes.
    """

    def __init__(self, worker: str, controller: Any):
        """`controller`: its actor."""
        self._worker, self._controller = worker, controller
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        pending: list[Any] = []
        while not self._over.wait(_HEARTBEAT):
            pending = ray.wait(pending, timeout=0)[1] if pending else []
            pending = pending or [invoke_beside(self._controller, "heard", self._worker)]
