"""Failures of a scorer are reported as they come, and one that only fails ends the run."""

import logging
import threading
from collections.abc import Sequence

from mesh.errors import UserError
from rl.protocol.messages import Score

STOP_AFTER = 256  # answers in a row of which none could be scored

_log = logging.getLogger(__name__)


class ScorerFails(UserError):
    """A scorer has failed on every one of its last `STOP_AFTER` answers."""


class FailureWatch:
    """Counts failures in a row, over all callers. Thread-safe."""

    def __init__(self, stop_after: int = STOP_AFTER, what: str = "the scorer"):
        self._stop_after, self._what = stop_after, what
        self._lock = threading.Lock()
        self._in_a_row = self._failed = self._seen = 0
        self._due = 1  # failures at which the next one is logged; doubled each time

    def check(self, problem_ids: Sequence[int], scores: Sequence[Score]) -> None:
        """Take note of scores (ScorerFails: none of the last `stop_after` could be; quotes the last error)."""
        with self._lock:
            for problem_id, score in zip(problem_ids, scores, strict=True):
                self._seen += 1
                if score.status == "ok":
                    self._in_a_row = 0
                    continue
                self._failed += 1
                self._in_a_row += 1
                why = f"problem {problem_id}: {score.status}" + (f": {score.error}" if score.error else "")
                if self._failed == self._due:
                    self._due *= 2
                    counts = self._failed, self._seen
                    _log.warning("%d of %d answers could not be scored: %s failed; %s", *counts, self._what, why)
                if self._in_a_row >= self._stop_after:
                    raise ScorerFails(
                        f"{self._what} failed on each of the last {self._in_a_row} answers, so there is nothing to "
                        f"learn from; the last one, {why}"
                    )
