"""A parameter server whose connections break: some before a request is handled, some after it, before the answer.

The client sees a connection that ends without an answer, as if a cable were pulled, and must repeat the request, which
is then handled twice. Other requests are slow.
"""

import random
import threading
import time
from typing import Any

from rl.parameter_server.rpc import Handle, Reply
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.transport.connection import TransportError
from rl.parameter_server.transport.server import Body

_AFFECTED = ("open", "write", "adopt", "commit", "manifest", "read", "newer")


class FlakyServer(ParameterServer):
    """A parameter server that drops and delays a share of its requests, by a seed of its own."""

    class Config(ParameterServer.Config):
        dropped: float = 0.25  # share of the requests that are dropped
        slow: float = 0.25
        seconds: float = 0.3  # further seconds of a slow request
        seed: int = 0

    def __init__(self, cfg: Config, **place: Any):
        super().__init__(cfg, **place)
        self._flaws, self._random, self._drawing = cfg, random.Random(cfg.seed), threading.Lock()

    def answers(self) -> Handle:
        honest = super().answers()

        def handle(operation: str, fields: dict[str, Any], body: Body) -> Reply:
            with self._drawing:
                kind, late = self._random.random(), self._random.random() < 0.5
            if operation not in _AFFECTED:
                return honest(operation, fields, body)
            if kind < self._flaws.slow:
                time.sleep(self._flaws.seconds)
            drop = kind > 1.0 - self._flaws.dropped
            if drop and not late:
                raise TransportError("dropped before it was looked at")
            reply = honest(operation, fields, body)
            if drop:
                raise TransportError("dropped when it was done")
            return reply

        return handle
