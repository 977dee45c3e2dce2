"""Queue between the callers of a verification pool, which submit answers and wait, and the thread of the pool."""

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from rl.roles.messages import Score
from rl.verification.shared_buffer import STATUSES

__all__ = ["Job", "JobQueue", "Submission"]


@dataclasses.dataclass(slots=True)
class Submission:
    """Answers that one caller submitted together: `done` is set when nothing is `left`, or with an `error`."""

    scores: list[Score | None]
    left: int
    done: threading.Event
    error: BaseException | None = None


@dataclasses.dataclass(slots=True)
class Job:
    """One answer to score; `attempts` counts the processes that died while scoring it."""

    problem_id: int
    text: str
    submission: Submission
    place: int
    attempts: int = 0


class JobQueue:
    """Jobs not yet scored, and counts of those that are. Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self._waiting: collections.deque[Job] = collections.deque()
        self._counts: collections.Counter[str] = collections.Counter()
        self._last_error = ""
        self._over: BaseException | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, problem_ids: Sequence[int], texts: Sequence[str]) -> Submission:
        """Queues a submission.

        Raises:
            RuntimeError: the pool is closed or has failed.
        """
        submission = Submission([None] * len(texts), len(texts), threading.Event())
        pairs = zip(problem_ids, texts, strict=True)
        jobs = [Job(problem_id, text, submission, i) for i, (problem_id, text) in enumerate(pairs)]
        with self._lock:
            if self._over is not None:
                raise RuntimeError(f"nothing can be scored: {self._over}") from self._over
            self._waiting.extend(jobs)
        if not jobs:
            submission.done.set()
        return submission

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Queue jobs again, ahead of all others."""
        with self._lock:
            self._waiting.extendleft(reversed(jobs))

    def take(self, limit: int) -> list[Job]:
        """Remove and return the next jobs, at most `limit`."""
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]

    def deliver(self, results: Sequence[tuple[Job, Score]], last_error: str = "") -> None:
        """Deliver scores to the callers and count them."""
        with self._lock:
            self._last_error = last_error or self._last_error
            for job, score in results:
                self._counts[score.status] += 1
                submission = job.submission
                submission.scores[job.place] = score
                submission.left -= 1
                if submission.left == 0:
                    submission.done.set()

    def count_restart(self) -> None:
        """Count a process that was replaced."""
        with self._lock:
            self._counts["restarts"] += 1

    def stats(self) -> dict[str, Any]:
        """Return counts since the start: one per status, "restarts", "scored"; "last_error" is a text."""
        with self._lock:
            counts = {status: self._counts[status] for status in STATUSES}
            scored = sum(counts.values())
            restarts = self._counts["restarts"]
            return {
                **counts,
                "restarts": restarts,
                "scored": scored,
                "last_error": self._last_error,
            }

    def end(self, error: BaseException, unfinished: Sequence[Job]) -> None:
        """Refuse further submissions and fail those that wait, queued or in a process."""
        with self._lock:
            self._over = error
            for job in (*self._waiting, *unfinished):
                job.submission.error = error
                job.submission.done.set()
            self._waiting.clear()
