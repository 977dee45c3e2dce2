"""Pool of killable processes that score answers, each answer with a wall-clock deadline.

One thread owns all processes: it starts them, hands out chunks, and waits for results, deaths and
deadlines at once. (The kernel binds the processes to the life of that thread, so nothing survives
the caller's kill -9.)

A process that exceeds the deadline of an answer is killed: what it had finished counts, the late answer gets
status "timeout", the rest of its chunk is queued again. If a process dies by itself, the answer that it was scoring
gets status "crash". If SIGKILL or SIGTERM came from outside (a preemption, the kernel
short of memory), the answer is tried again, at most three times in all: it may not be its fault.

What a process writes is checked: it may be in the hands of the answer that it scores. A message that is none, or a row
that is no result, ends the process, and the answer at hand gets status "crash".

Measured on 2026-11-22 (2,000 answers of a microsecond, two processes, CPU time per answer, three runs each): ours 30 to
60 us; Pebble 5.2.3 330 to 385 us with a deadline for each answer, or 30 to 50 us in chunks of 100, of which one that
hangs loses the whole chunk; loky 3.7.0 505 to 525 us, without deadlines. Here and in Pebble the rest continues 1.1 s
after an answer that hangs (deadline 1 s). An idle process killed from outside breaks both pools; ours replaces it.
"""

import contextlib
import logging
import math
import selectors
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.protocol.messages import Details, Score, ScoreStatus
from rl.verification.job_queue import Job, JobQueue
from rl.verification.rewards import NotAReward, check_terms
from rl.verification.shared_buffer import PENDING, STATUSES
from rl.verification.wire import MalformedMessage
from rl.verification.worker_process import WorkerProcess

__all__ = ["WorkerPool"]

_log = logging.getLogger(__name__)

_CAPACITY = 512  # answers of the largest chunk
_CHUNK_SECONDS = 0.02  # target duration of a chunk: short to wait for, long beside a round trip
_REPORT_SECONDS = 30.0
_ATTEMPTS = 3  # failed starts in a row; processes that may die on one answer through no fault of its own
_EXTERNAL = (-signal.SIGKILL, -signal.SIGTERM)


class WorkerPool:
    """`processes` processes that build `scorer_config` and score with it. Thread-safe."""

    def __init__(
        self,
        scorer_config: Any,
        *,
        processes: int,
        deadline_s: float,
        start_deadline_s: float,
        memory_mb: int,
        by_group: bool = False,
    ):
        self._by_group = by_group
        self.isolation = ""
        """Isolation of its processes: "namespaces, seccomp", "none: why"; "" if not wanted."""
        self._scorer_config = scorer_config
        self._processes = processes
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._memory_mb = memory_mb
        self._queue = JobQueue()
        self._closing = False
        # A process is in exactly one of these three; only the pool's thread moves it.
        self._starting: set[WorkerProcess] = set()
        self._idle: set[WorkerProcess] = set()
        self._busy: dict[WorkerProcess, list[Job]] = {}
        self._failed_starts = 0
        self._answer_seconds = 1e-3  # running mean
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="verification-pool", daemon=True)
        self._thread.start()

    def score(
        self, problem_ids: Sequence[int], answers: Sequence[str], details: Sequence[Details] | None = None
    ) -> list[Score]:
        """Return one score per answer, in order. Blocks until all are scored, failed or timed out.

        Raises:
            RuntimeError: the pool is closed, or its processes cannot be started.
        """
        submission = self._queue.put(problem_ids, answers, details, self._by_group)
        self._wake()
        while not submission.done.wait(_REPORT_SECONDS):
            _log.warning("%d of %d scores: %s", submission.left, len(answers), self.describe_wait())
        if submission.error is not None:
            raise RuntimeError(
                f"{submission.left} of {len(answers)} answers were not scored: {submission.error}"
            ) from submission.error
        return [score for score in submission.scores if score is not None]

    def describe_wait(self) -> str:
        """Describe, for a log line, what callers of `score` are waiting for."""
        now = time.monotonic()
        parts = [f"pid {w.pid} starting for {now - w.since:.1f} s" for w in [*self._starting]]
        for worker in [*self._busy]:
            parts.append(f"pid {worker.pid} at its chunk for {now - worker.since:.1f} s")
        return f"waiting for verification ({self._deadline_s:g} s at most per answer); {len(self._queue)} queued; " + (
            "; ".join(parts) or "no process is at work"
        )

    def stats(self) -> dict[str, Any]:
        """Return counts since the start: one per status, "restarts", "scored"; "last_error", "isolation" are texts."""
        return {**self._queue.stats(), "isolation": self.isolation}

    def pids(self) -> list[int]:
        """Return the ids of the processes that are alive."""
        return sorted(worker.pid for worker in [*self._starting, *self._idle, *self._busy])

    def close(self) -> None:
        """Kill and reap every process; callers that still wait get a RuntimeError."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: already awake; closed: the pool has ended
            self._wake_write.send(b"w")

    # ---- the pool's thread ----

    def _run(self) -> None:
        error: BaseException = RuntimeError("the verification pool is closed")
        try:
            while not self._closing:
                self._turn()
        except BaseException as caught:
            _log.exception("the verification pool failed")
            error = caught
        finally:
            self._end(error)

    def _turn(self) -> None:
        while len(self._starting) + len(self._idle) + len(self._busy) < self._processes:
            self._start_worker()
        self._hand_out()
        for key, events in self._selector.select(self._seconds_to_deadline()):
            worker = key.data
            if worker is None:
                self._wake_read.recv(4096)
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(worker)
            if events & selectors.EVENT_READ:
                self._read(worker)
        now = time.monotonic()
        for worker in [w for w in (*self._starting, *self._busy) if self._due(w) <= now]:
            self._retire(worker, late=True)

    def _start_worker(self) -> None:
        worker = WorkerProcess(self._scorer_config, capacity=_CAPACITY, memory_mb=self._memory_mb)
        self._starting.add(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _hand_out(self) -> None:
        while self._idle:
            fair = -(-len(self._queue) // self._processes)
            chunk = self._queue.take(max(1, min(_CAPACITY, fair, int(_CHUNK_SECONDS / self._answer_seconds))))
            if not chunk:
                return
            worker = self._idle.pop()
            self._busy[worker] = chunk
            count = sum(len(job.texts) for job in chunk)
            worker.begin(count)
            worker.send([(job.problem_id, job.texts, job.details) for job in chunk])
            self._flush(worker)

    def _flush(self, worker: WorkerProcess) -> None:
        unsent = worker.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
        self._selector.modify(worker.connection, events, worker)

    def _read(self, worker: WorkerProcess) -> None:
        try:
            for message in worker.receive():
                self._handle(worker, message)
        except EOFError:
            self._retire(worker)
        except MalformedMessage as error:
            _log.warning("process %d sent %s", worker.pid, error)
            self._retire(worker)

    def _handle(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if worker in self._starting and "ready" in message:
            self._starting.remove(worker)
            self._failed_starts = 0
            self._idle.add(worker)
            worker.remove_scratch()
            self._note_isolation(str(message.get("isolation", ""))[:200])
        elif worker in self._busy and "row" in message:
            worker.add_note(message)
        elif worker in self._busy and "done" in message:
            left_out = self._collect(worker, self._busy.pop(worker))
            self._idle.add(worker)
            if left_out:
                crash = Score(0.0, "crash", 0.0, "the process passed over it")
                self._queue.deliver([(job, [crash] * len(job.texts)) for job in left_out])
                raise MalformedMessage(f"that it is done, without {len(left_out)} results")
        else:
            raise MalformedMessage("what nobody has asked for")

    def _note_isolation(self, isolation: str) -> None:
        if isolation.startswith("none") and not self.isolation:
            _log.warning("verification processes are not kept apart from this machine: %s", isolation)
        self.isolation = isolation

    def _collect(self, worker: WorkerProcess, chunk: list[Job]) -> list[Job]:
        """Deliver the results in the shared buffer; return the jobs that have none."""
        rows = worker.results.rows[: sum(len(job.texts) for job in chunk)].copy()
        done = int(np.argmin(np.append(rows["status"] != PENDING, False)))  # results come in order
        seconds = np.clip(np.nan_to_num(rows["seconds"][:done]), 0.0, self._deadline_s)
        if done:
            self._answer_seconds += 0.2 * (max(1e-6, float(seconds.mean())) - self._answer_seconds)
        columns = rows["reward"][:done].tolist(), rows["status"][:done].tolist(), seconds.tolist()
        scores = [_score(worker, index, *row) for index, row in enumerate(zip(*columns, strict=True))]
        delivered, start = [], 0
        for job in chunk:
            if start + len(job.texts) > done:
                break
            delivered.append((job, scores[start : start + len(job.texts)]))
            start += len(job.texts)
        self._queue.deliver(delivered)
        del chunk[: len(delivered)]
        return chunk

    def _seconds_to_deadline(self) -> float | None:
        ends = [self._due(worker) for worker in (*self._starting, *self._busy)]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _due(self, worker: WorkerProcess) -> float:
        """Return the time at which this worker misses its deadline, unless it finishes an answer before."""
        if worker in self._starting:
            return worker.since + self._start_deadline_s
        return self._begun(worker) + self._deadline_s

    def _begun(self, worker: WorkerProcess) -> float:
        """Return when the current answer was started; the process says so, within what can be true."""
        started = worker.results.started
        if not worker.since <= started <= time.monotonic():  # refuses NaN, too
            started = worker.since
        return min(started, worker.since + self._deadline_s * (worker.answers - 1))

    def _retire(self, worker: WorkerProcess, *, late: bool = False) -> None:
        """Kill and remove a worker that is late or dead, and settle the jobs that it had."""
        self._selector.unregister(worker.connection)
        code = worker.kill()
        self._queue.count_restart()
        if worker in self._starting:
            self._starting.remove(worker)
            self._note_failed_start(worker, code, late)
        elif worker in self._busy:
            pending = self._collect(worker, self._busy.pop(worker))
            if pending:
                self._settle(worker, pending, code, late)
        else:
            self._idle.remove(worker)
        worker.release()

    def _settle(self, worker: WorkerProcess, pending: list[Job], code: int, late: bool) -> None:
        """Score the first pending job, on which the worker ended, as a failure; queue the others again."""
        job = pending[0]
        begun = worker.results.started >= worker.since
        seconds = time.monotonic() - self._begun(worker)
        blame: ScoreStatus | None = "timeout" if late else "crash"
        if late and seconds < self._deadline_s:
            blame = None  # the late answer was finished just before the kill, and this one started
        elif not begun or (not late and code in _EXTERNAL):
            job.attempts += 1
            if job.attempts < _ATTEMPTS:
                blame = None
        if blame is not None:
            _log.warning(
                "problem %d: %s after %.2f s in process %d (exit code %d)",
                *(job.problem_id, blame, seconds, worker.pid, code),
            )
            why = f"not done after {self._deadline_s:g} s" if late else f"the process ended with exit code {code}"
            self._queue.deliver([(job, [Score(0.0, blame, seconds, why)] * len(job.texts))])
            pending = pending[1:]
        self._queue.put_back(pending)

    def _note_failed_start(self, worker: WorkerProcess, code: int, late: bool) -> None:
        ended = f"was not ready after {self._start_deadline_s:g} s"
        if not late:
            ended = f"ended with exit code {code}"
        output = worker.stderr_tail() or "no output"
        why = f"verification process {worker.pid} {ended} while it built its scorer: {output}"
        self._failed_starts += 1
        if self._failed_starts >= _ATTEMPTS:
            raise RuntimeError(f"{why} ({self._failed_starts} failed starts in a row)")
        _log.warning("%s", why)

    def _end(self, error: BaseException) -> None:
        for worker in [*self._starting, *self._idle, *self._busy]:
            worker.kill()
            worker.release()
        unfinished = [job for chunk in self._busy.values() for job in chunk]
        for workers in (self._starting, self._idle, self._busy):
            workers.clear()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
        self._queue.end(error, unfinished)


def _score(worker: WorkerProcess, index: int, reward: float, code: int, seconds: float) -> Score:
    """Return a score made of a row of the buffer and of what the process has said of it, both checked."""
    note = worker.notes.get(index, {})
    status: ScoreStatus = STATUSES[code - 1] if 1 <= code <= len(STATUSES) else "crash"
    error = str(note.get("error", ""))[:500]
    terms: dict[str, float] = {}
    try:
        terms = check_terms(note.get("terms", {}))
    except (NotAReward, AttributeError, TypeError) as refused:
        status, error = "error", str(refused)
    if status == "ok" and not math.isfinite(reward):
        status, error = "error", f"the reward is {reward}"
    if status != "ok":
        return Score(0.0, status, seconds, error)
    return Score(reward, "ok", seconds, terms=tuple(terms.items()))
