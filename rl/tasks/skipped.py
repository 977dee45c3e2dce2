"""Problems that a run leaves out, and why: counted by family, and written down: a resumed run does the same.

What raises, and what is too long, is left out by every process alike. What takes too long is not, as another machine or
another hour is faster: so both verdicts on a slow problem, "slow" and "kept", hold for the whole run.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows

Reason = Literal["raised", "slow", "long", "truncated", "kept"]
_WORDS: Mapping[str, str] = {
    "raised": "raised when they were made",
    "slow": "took too long to make",
    "long": "have prompts longer than max_prompt_tokens",
    "truncated": "are cut to max_prompt_tokens",
}


def skipped_path(run: Path) -> Path:
    """Return the file in a run directory."""
    return run / "skipped.jsonl"


class SkippedProblems:
    """Verdicts on problems by their ids, in a file of rows that only grows; without a file, of this process alone.

    Thread-safe.
    """

    def __init__(self, path: Path | None = None):
        self._log = None if path is None else EventLog(path)
        self._reasons: dict[int, Reason] = {}
        self._counts: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()
        for row in [] if path is None else read_rows(path):
            self._count(row["problem"], row["family"], row["event"])

    def verdict(self, problem_id: int) -> Reason | None:
        """Return what was found before about a problem; None: nothing."""
        return self._reasons.get(problem_id)

    def add(self, problem_id: int, family: str, reason: Reason, what: str) -> None:
        """Record a verdict; the first one on a problem holds. `what` is for people."""
        with self._lock:
            if problem_id in self._reasons:
                return
            self._count(problem_id, family, reason)
        if self._log is not None:
            self._log.append("tasks", reason, family=family, problem=problem_id, what=what[:300])

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many problems of each family have been left out, or cut, by reason."""
        with self._lock:
            found = {family: {r: n for r, n in sorted(c.items()) if r != "kept"} for family, c in self._counts.items()}
        return {family: reasons for family, reasons in sorted(found.items()) if reasons}

    def figures(self) -> dict[str, float]:
        """Return the counts over all families as metrics, `problems_slow` and the like; none that are 0."""
        total: Counter[str] = Counter()
        for reasons in self.counts().values():
            total.update(reasons)
        return {f"problems_{reason}": float(n) for reason, n in sorted(total.items())}

    def _count(self, problem_id: int, family: str, reason: Reason) -> None:
        self._reasons[problem_id] = reason
        self._counts.setdefault(family, Counter())[reason] += 1


def skipped_text(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a sentence for each family and reason, for reports."""
    return [
        f"{n} problem{'s' * (n > 1)} of {family} {'' if reason == 'truncated' else 'left out: '}{_WORDS[reason]}"
        for family, reasons in counts.items()
        for reason, n in reasons.items()
    ]
