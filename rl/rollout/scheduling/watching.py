"""The thread in which watches read what their sequences draw, while the device draws on.

A watch is code of a request: one that raises or hangs is counted, and its draw goes on as if it had none. Draws do not
depend on how fast it is: the engine waits for it before it takes the next tokens.
"""

import queue
import threading
import time

from rl.rollout.agent_loops.commands import Abort
from rl.rollout.decoding.watched import WatchedDraw
from rl.rollout.sequence import Sequence

LIMIT_S = 1.0  # seconds in which a watch must have read the tokens of a dispatch

_Job = tuple[Sequence, WatchedDraw, list[int]]
_Answer = tuple[Abort | None, BaseException | None, float]  # the last: CPU seconds


class Watching:
    """Watches of an engine, fed by its thread: `feed` returns at once, `settle` waits for what they say."""

    def __init__(self) -> None:
        self._reader: _Reader | None = None
        self._jobs: list[_Job] = []
        self._counts = dict.fromkeys(("watched_tokens", "watch_aborts", "watch_failures"), 0)
        self._cpu_seconds = 0.0

    def __del__(self) -> None:
        if self._reader is not None:
            self._reader.jobs.put(None)

    def stats(self) -> dict[str, float]:
        """Return counts since the start, once there was a watch."""
        watched = self._counts["watched_tokens"]
        return {**self._counts, "watch_cpu_seconds": self._cpu_seconds} if watched else {}

    def feed(self, sequences: list[Sequence]) -> None:
        """Have the watches of sequences read their new tokens."""
        for sequence in sequences:
            draw, tokens = sequence.watched, sequence.unwatched()
            if draw is None or not tokens:
                continue
            self._counts["watched_tokens"] += len(tokens)
            if draw.failed:
                draw.settle(None, failed=True)
                continue
            self._jobs.append((sequence, draw, tokens))
            self._read(draw, tokens)

    def settle(self) -> list[Sequence]:
        """Wait until all tokens are read; returns the sequences whose draws are aborted."""
        aborted: list[Sequence] = []
        jobs, self._jobs = self._jobs, []
        for number, (sequence, draw, _) in enumerate(jobs):
            assert self._reader is not None
            abort, error, seconds = self._reader.answer()
            self._cpu_seconds += seconds
            draw.settle(abort, failed=error is not None)
            if isinstance(error, TimeoutError):  # thread given up: another one reads the rest
                self._reader = None
                for _, later, tokens in jobs[number + 1 :]:
                    self._read(later, tokens)
            self._counts["watch_failures"] += error is not None
            if abort is not None and sequence.watched is draw:
                self._counts["watch_aborts"] += 1
                aborted.append(sequence)
        return aborted

    def _read(self, draw: WatchedDraw, tokens: list[int]) -> None:
        if self._reader is None:
            self._reader = _Reader()
        self._reader.jobs.put((draw, tokens))


class _Reader:
    """One thread. If a watch never returns it is given up with its thread, which reads nothing more."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[WatchedDraw, list[int]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._given_up = False
        threading.Thread(target=self._run, name="watches", daemon=True).start()

    def answer(self) -> _Answer:
        """Return the answer to the next job."""
        try:
            return self._answers.get(timeout=LIMIT_S)
        except queue.Empty:
            self._given_up = True
            return None, TimeoutError(f"a watch has not returned after {LIMIT_S:g} s"), 0.0

    def _run(self) -> None:
        while not self._given_up and (job := self.jobs.get()) is not None:
            draw, tokens = job
            began, abort, failure = time.thread_time(), None, None
            try:
                abort = draw.read(tokens)
            except BaseException as error:  # SystemExit too: the thread is of all watches
                failure = error
            self._answers.put((abort, failure, time.thread_time() - began))
