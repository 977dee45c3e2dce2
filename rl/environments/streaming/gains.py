"""Gains of running tools ahead, for all episodes of a process: a tool that does not gain waits from then on."""

import logging
import threading
from collections import Counter

_TURNS = 16  # turns of a tool before it is judged
_LOG = logging.getLogger(__name__)


class Gains:
    """Seconds that running ahead has saved, and which tools it is on for; thread-safe."""

    def __init__(self, recheck_every: int):
        """`recheck_every`: one of so many calls is made again, and compared; 0: none."""
        self._recheck_every = recheck_every
        self._lock = threading.Lock()
        self._turns, self._calls = Counter[str](), Counter[str]()
        self._saved = dict[str, float]()
        self._off, self._impure = set[str](), set[str]()

    @property
    def off(self) -> frozenset[str]:
        """Tools that are not run ahead any more."""
        return frozenset(self._off)

    @property
    def impure(self) -> frozenset[str]:
        """Tools that claim to be pure, and have answered the same call in two ways."""
        return frozenset(self._impure)

    def turn(self, tool: str, saved: float) -> None:
        """Count a turn with calls of a tool, and the seconds that running them ahead has saved, or cost."""
        with self._lock:
            self._turns[tool] += 1
            self._saved[tool] = self._saved.get(tool, 0.0) + saved
            if self._turns[tool] >= _TURNS and self._saved[tool] < 0:
                self._off.add(tool)

    def to_recheck(self, tool: str) -> bool:
        """Count a call; returns True if it is to be made again."""
        with self._lock:
            self._calls[tool] += 1
            return self._recheck_every > 0 and self._calls[tool] % self._recheck_every == 1 % self._recheck_every

    def found_impure(self, tool: str) -> None:
        """Run a tool ahead no more: it is not what it claims to be."""
        with self._lock:
            if tool not in self._impure:
                _LOG.warning("tool %r claims to be pure, but the same call has had two results; it waits now", tool)
            self._impure.add(tool)
            self._off.add(tool)
