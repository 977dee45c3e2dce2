"""The verifier: the role that scores answers. A hang or a crash is a status, never a reward.

One thread owns all processes: it starts them, hands out chunks, and waits for results, deaths and deadlines at once.
(The kernel binds the processes to the life of that thread, so nothing survives the caller's kill -9.)

A process that exceeds the deadline of an answer is killed: what it had finished counts, the late answer gets
status "timeout", the rest of its chunk is queued again. If a process dies by itself, the answer that it was scoring
gets status "crash". If SIGKILL or SIGTERM came from outside (a preemption, the kernel short of memory), the answer is
tried again, at most three times in all: it may not be its fault.

What a process sends is checked: it may be in the hands of the answer that it scores. A message that is no result ends
the process, and the answer at hand gets status "crash".
"""

import contextlib
import logging
import selectors
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, override

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, reach
from axlearn_like.run.closing import Closing
from rl.protocol.messages import Details, Score, ScoreStatus
from rl.verification.failures import FailureWatch
from rl.verification.job_queue import Job, JobQueue
from rl.verification.scorers import Scorer
from rl.verification.wire import MalformedMessage
from rl.verification.worker_process import WorkerProcess

_log = logging.getLogger(__name__)

_CAPACITY = 512  # answers of the largest chunk
_CHUNK_SECONDS = 0.02  # target duration of a chunk: short to wait for, long beside a round trip
_REPORT_SECONDS = 30.0
_ATTEMPTS = 3  # failed starts in a row; processes that may die on one answer through no fault of its own
_EXTERNAL = (-signal.SIGKILL, -signal.SIGTERM)


class Verifier(Closing, Configurable):
    """Scores answers in `processes` killable processes; thread-safe. `close` it, or use `with`.

    >>> from rl.tasks.family import TaskFamily
    >>> from rl.tasks.mixture import TaskMixture
    >>> from rl.verification.scorers import ReasoningGymScorer
    >>> from rl.verification.service import Verifier
    >>> tasks = TaskMixture.Config(families=(TaskFamily.Config(name="chain_sum"),), seed=0)
    >>> problem = tasks.build().train(0)
    >>> with Verifier.Config(scorer=ReasoningGymScorer.Config(mixture=tasks), processes=1).build() as verifier:
    ...     [score.reward for score in verifier.score([problem.id, problem.id], [problem.answer, "no idea"])]
    [1.0, 0.0]
    """

    class Config(ConfigBase["Verifier"]):
        scorer: Scorer.Config = REQUIRED
        processes: int = 2
        deadline_s: float = 10.0  # wall-clock seconds that one answer may take before its process is killed
        start_deadline_s: float = 120.0  # wall-clock seconds that a process may take to import and build the scorer
        # Address space of a process, as an answer may ask for 9**9**9; beyond it the scorer gets a MemoryError. 0: no
        # limit.
        memory_mb: int = 4096

        @override
        def reaches(self) -> tuple[str, ...]:
            return tuple(reach(self.scorer)) if isinstance(self.scorer, ConfigBase) else ()

        @override
        def check_fields(self) -> None:
            self.require_least(1, "processes")
            self.require_least(0, "memory_mb")
            for field in ("deadline_s", "start_deadline_s"):
                self.require(field, getattr(self, field) > 0, "seconds, more than 0")

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._by_group = "group" in cfg.scorer.wants()
        self._isolation = ""
        self._failures = FailureWatch()
        self._queue = JobQueue()
        self._closing = False
        # A process is in exactly one of these three; only the verifier's thread moves it.
        self._starting: set[WorkerProcess] = set()
        self._idle: set[WorkerProcess] = set()
        self._busy: dict[WorkerProcess, list[Job]] = {}
        self._failed_starts = self._restarts = 0
        self._answer_seconds = 1e-3  # running mean
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="verifier", daemon=True)
        self._thread.start()

    def score(
        self, problem_ids: Sequence[int], answers: Sequence[str], details: Sequence[Details] | None = None
    ) -> list[Score]:
        """Return one score per answer, in order; `answers[i]` answers problem `problem_ids[i]`.

        Raises:
            ValueError: the lengths differ. RuntimeError: the verifier is closed, or its scorer cannot be built (with
            what its process said). ScorerFails: none of the last answers, and they were many, could be scored.
        """
        submission = self._queue.put(problem_ids, answers, details, self._by_group)
        self._wake()
        while not submission.done.wait(_REPORT_SECONDS):
            _log.warning("%d of %d scores: %s", submission.left, len(answers), self.describe_wait())
        if submission.error is not None:
            raise RuntimeError(
                f"{submission.left} of {len(answers)} answers were not scored: {submission.error}"
            ) from submission.error
        scores = [score for score in submission.scores if score is not None]
        self._failures.check(problem_ids, scores)
        return scores

    def describe_wait(self) -> str:
        """Describe, for a log line, what callers of `score` are waiting for."""
        now = time.monotonic()
        parts = [f"pid {w.pid} starting for {now - w.since:.1f} s" for w in [*self._starting]]
        parts += [f"pid {w.pid} at its chunk for {now - w.since:.1f} s" for w in [*self._busy]]
        limit = f"waiting for verification ({self._cfg.deadline_s:g} s at most per answer)"
        return f"{limit}; {len(self._queue)} queued; {'; '.join(parts) or 'no process is at work'}"

    def stats(self) -> dict[str, Any]:
        """Return counts since the start: "scored", "ok", "error", "timeout", "crash", "restarts".

        "last_error" is the text of the last exception of a scorer, "isolation" what keeps its processes apart:
        "namespaces, seccomp", "none: why"; "" if not wanted.
        """
        return {**self._queue.stats(), "restarts": self._restarts, "isolation": self._isolation}

    def pids(self) -> list[int]:
        """Return the ids of the processes that are alive, for the timeline and for tests that kill them."""
        return sorted(worker.pid for worker in [*self._starting, *self._idle, *self._busy])

    @override
    def close(self) -> None:
        """Kill and reap all processes; callers that wait in `score` get a RuntimeError."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: already awake; closed: the thread has ended
            self._wake_write.send(b"w")

    # ---- the verifier's thread

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
        while len(self._starting) + len(self._idle) + len(self._busy) < self._cfg.processes:
            worker = WorkerProcess(self._cfg.scorer, self._cfg.memory_mb)
            self._starting.add(worker)
            self._selector.register(worker.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)
        self._hand_out()
        ends = [self._due(worker) for worker in (*self._starting, *self._busy)]
        for key, events in self._selector.select(max(0.0, min(ends) - time.monotonic()) if ends else None):
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

    def _hand_out(self) -> None:
        while self._idle:
            fair = -(-len(self._queue) // self._cfg.processes)
            chunk = self._queue.take(max(1, min(_CAPACITY, fair, int(_CHUNK_SECONDS / self._answer_seconds))))
            if not chunk:
                return
            worker = self._idle.pop()
            self._busy[worker] = chunk
            worker.begin(chunk)
            self._flush(worker)

    def _flush(self, worker: WorkerProcess) -> None:
        unsent = worker.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
        self._selector.modify(worker.connection, events, worker)

    def _read(self, worker: WorkerProcess) -> None:
        try:
            for message in worker.receive():
                self._handle(worker, message)
        except BlockingIOError:
            return
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
            isolation = str(message.get("isolation", ""))[:200]
            if isolation.startswith("none") and not self._isolation:
                _log.warning("verification processes are not kept apart from this machine: %s", isolation)
            self._isolation = isolation
        elif worker in self._busy:
            worker.add(message)
            if len(worker.scores) == worker.answers:
                self._collect(worker)
                self._idle.add(worker)
        else:
            raise MalformedMessage("what nobody has asked for")

    def _collect(self, worker: WorkerProcess) -> list[Job]:
        """Deliver the scores of the jobs that a worker has finished; return those that it has not."""
        jobs, scores = self._busy.pop(worker), worker.scores
        if scores:
            mean = sum(score.seconds for score in scores) / len(scores)
            self._answer_seconds += 0.2 * (max(1e-6, mean) - self._answer_seconds)
        finished, start = [], 0
        for job in jobs:
            if (end := start + len(job.texts)) > len(scores):
                break
            finished.append((job, scores[start:end]))
            start = end
        self._queue.deliver(finished)
        return jobs[len(finished) :]

    def _due(self, worker: WorkerProcess) -> float:
        """Return the time at which this worker misses its deadline, unless it finishes an answer before."""
        if worker in self._starting:
            return worker.since + self._cfg.start_deadline_s
        return (worker.begun or worker.since) + self._cfg.deadline_s

    def _retire(self, worker: WorkerProcess, *, late: bool = False) -> None:
        """Kill and remove a worker that is late or dead, and settle the jobs that it had."""
        self._selector.unregister(worker.connection)
        code = worker.kill()
        self._restarts += 1
        if worker in self._starting:
            self._starting.remove(worker)
            self._note_failed_start(worker, code, late)
        elif worker in self._busy:
            with contextlib.suppress(BlockingIOError, EOFError, MalformedMessage):
                while late:  # results that came at the last moment
                    for message in worker.receive():
                        worker.add(message)
            if pending := self._collect(worker):
                self._settle(worker, pending, code, late)
        else:
            self._idle.remove(worker)
        worker.release()

    def _settle(self, worker: WorkerProcess, pending: list[Job], code: int, late: bool) -> None:
        """Score the first pending job, on which the worker ended, as a failure; queue the others again."""
        job = pending[0]
        seconds = time.monotonic() - (worker.begun or worker.since)
        blame: ScoreStatus | None = "timeout" if late else "crash"
        if late and seconds < self._cfg.deadline_s:
            blame = None  # the late answer was finished just before the kill, and this one started
        elif worker.begun is None or (not late and code in _EXTERNAL):
            job.attempts += 1
            if job.attempts < _ATTEMPTS:
                blame = None
        if blame is not None:
            _log.warning(
                "problem %d: %s after %.2f s in process %d (exit code %d)",
                *(job.problem_id, blame, seconds, worker.pid, code),
            )
            why = f"not done after {self._cfg.deadline_s:g} s" if late else f"the process ended with exit code {code}"
            self._queue.deliver([(job, [Score(0.0, blame, seconds, why)] * len(job.texts))])
            pending = pending[1:]
        self._queue.put_back(pending)

    def _note_failed_start(self, worker: WorkerProcess, code: int, late: bool) -> None:
        ended = f"was not ready after {self._cfg.start_deadline_s:g} s" if late else f"ended with exit code {code}"
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
