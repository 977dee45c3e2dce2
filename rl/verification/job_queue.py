"""Queue between the callers of a verifier, which submit answers and wait, and the verifier's thread."""

import collections
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from rl.protocol.messages import Details, Score, ScoreStatus


@dataclasses.dataclass(slots=True)
class Submission:
    """Answers that one caller submitted together: `done` is set when nothing is `left`, or with an `error`."""

    scores: list[Score | None]
    left: int
    done: threading.Event
    error: BaseException | None = None


@dataclasses.dataclass(slots=True)
class Job:
    """Answers to score together: one, or all of a group. `attempts` counts the processes that died at it.

    `place` is that of its first answer in the submission.
    """

    problem_id: int
    texts: Sequence[str]
    details: Sequence[Details]
    submission: Submission
    place: int
    attempts: int = 0


def split(problem_ids: Sequence[int], texts: Sequence[str], by_group: bool) -> Iterator[tuple[int, slice]]:
    """Yield problem and answers of each job: those of one problem in a row, or one answer each."""
    start = 0
    for end, (problem_id, _) in enumerate(zip(problem_ids, texts, strict=True), start=1):
        if not by_group or end == len(texts) or problem_ids[end] != problem_id:
            yield problem_id, slice(start, end)
            start = end


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

    def put(
        self,
        problem_ids: Sequence[int],
        texts: Sequence[str],
        details: Sequence[Details] | None = None,
        by_group: bool = False,
    ) -> Submission:
        """Queue a submission; `by_group`: a problem's answers are one job (RuntimeError: closed, or failed)."""
        submission = Submission([None] * len(texts), len(texts), threading.Event())
        jobs = [
            Job(problem_id, texts[part], [] if details is None else details[part], submission, part.start)
            for problem_id, part in split(problem_ids, texts, by_group)
        ]
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
        """Remove and return the next jobs, with at most `limit` answers, or one job that has more."""
        jobs: list[Job] = []
        with self._lock:
            while self._waiting and (not jobs or limit >= len(self._waiting[0].texts)):
                jobs.append(self._waiting.popleft())
                limit -= len(jobs[-1].texts)
        return jobs

    def deliver(self, results: Sequence[tuple[Job, Sequence[Score]]]) -> None:
        """Deliver the scores of jobs to the callers and count them."""
        with self._lock:
            for job, scores in results:
                submission = job.submission
                submission.scores[job.place : job.place + len(scores)] = scores
                submission.left -= len(scores)
                for score in scores:
                    self._counts[score.status] += 1
                    if score.error:
                        self._last_error = f"problem {job.problem_id}: {score.error}"
                if submission.left == 0:
                    submission.done.set()

    def stats(self) -> dict[str, Any]:
        """Return counts since the start: one per status, "scored"; "last_error" is a text."""
        with self._lock:
            counts = {status: self._counts[status] for status in get_args(ScoreStatus)}
            return {**counts, "scored": sum(counts.values()), "last_error": self._last_error}

    def end(self, error: BaseException, unfinished: Sequence[Job]) -> None:
        """Refuse further submissions and fail those that wait, queued or in a process."""
        with self._lock:
            self._over = error
            for job in (*self._waiting, *unfinished):
                job.submission.error = error
                job.submission.done.set()
            self._waiting.clear()
