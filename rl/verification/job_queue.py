"""The queue between the callers of a verification pool, who wait for batches, and its thread."""

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from rl.roles.messages import Score
from rl.verification.shared_buffer import STATUSES

__all__ = ["Answer", "AnswerQueue", "Batch"]


@dataclasses.dataclass(slots=True)
class Batch:
    """What one caller waits for: `done` is set when nothing is `left`, or with an `error`."""

    scores: list[Score | None]
    left: int
    done: threading.Event
    error: BaseException | None = None


@dataclasses.dataclass(slots=True)
class Answer:
    """One answer to score; `attempts` counts the processes that died on it."""

    problem_id: int
    text: str
    batch: Batch
    place: int
    attempts: int = 0


class AnswerQueue:
    """Answers not yet scored, and the counts of those that are. Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self._waiting: collections.deque[Answer] = collections.deque()
        self._counts: collections.Counter[str] = collections.Counter()
        self._last_error = ""
        self._over: BaseException | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, problem_ids: Sequence[int], texts: Sequence[str]) -> Batch:
        """Queues a batch.

        Raises:
            RuntimeError: the pool is closed or has failed.
        """
        batch = Batch([None] * len(texts), len(texts), threading.Event())
        pairs = zip(problem_ids, texts, strict=True)
        answers = [Answer(problem_id, text, batch, i) for i, (problem_id, text) in enumerate(pairs)]
        with self._lock:
            if self._over is not None:
                raise RuntimeError(f"nothing can be scored: {self._over}") from self._over
            self._waiting.extend(answers)
        if not answers:
            batch.done.set()
        return batch

    def put_back(self, answers: Sequence[Answer]) -> None:
        """Queues answers again, before all others."""
        with self._lock:
            self._waiting.extendleft(reversed(answers))

    def take(self, limit: int) -> list[Answer]:
        """The next answers, at most `limit`."""
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]

    def deliver(self, results: Sequence[tuple[Answer, Score]], last_error: str = "") -> None:
        """Hands scores to the callers and counts them."""
        with self._lock:
            self._last_error = last_error or self._last_error
            for answer, score in results:
                self._counts[score.status] += 1
                batch = answer.batch
                batch.scores[answer.place] = score
                batch.left -= 1
                if batch.left == 0:
                    batch.done.set()

    def count_restart(self) -> None:
        """Counts a process that was replaced."""
        with self._lock:
            self._counts["restarts"] += 1

    def stats(self) -> dict[str, Any]:
        """Counts since the start: one per status, "restarts", "scored"; "last_error" is a text."""
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

    def end(self, error: BaseException, unfinished: Sequence[Answer]) -> None:
        """Refuses all further batches and fails those that wait, here or in a process."""
        with self._lock:
            self._over = error
            for answer in (*self._waiting, *unfinished):
                answer.batch.error = error
                answer.batch.done.set()
            self._waiting.clear()
