"""A parameter server whose connections break: some before a request is looked at, some when it is done but unanswered.

The transport closes a connection without an answer when its store raises an `OSError`, which is what a client sees of a
cable pulled; the client must repeat the request, and a push that had arrived comes twice. Others are slow.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rl.parameter_server import ParameterServer
from rl.weights.encoding import EncodedWeights


class FlakyServer(ParameterServer):
    """Drops and delays a share of the transfers, drawn with a seed of its own."""

    class Config(ParameterServer.Config):
        dropped: float = 0.25  # share of the transfers
        slow: float = 0.25
        seconds: float = 0.3  # that a slow one takes longer
        seed: int = 0

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._flaws, self._random = cfg, random.Random(cfg.seed)

    def push(self, weights: EncodedWeights) -> None:
        with self._trouble():
            super().push(weights)

    def pull(self, version: int, timeout: float = 0.0) -> EncodedWeights:
        with self._trouble():
            return super().pull(version, timeout)

    @contextmanager
    def _trouble(self) -> Iterator[None]:
        kind, late = self._random.random(), self._random.random() < 0.5
        if kind < self._flaws.slow:
            time.sleep(self._flaws.seconds)
        drop = kind > 1.0 - self._flaws.dropped
        if drop and not late:
            raise ConnectionResetError("dropped before it was looked at")
        yield
        if drop and late:
            raise ConnectionResetError("dropped when it was done")
