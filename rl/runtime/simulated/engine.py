"""A rollout engine whose dispatches are durations: requests, rows and versions as in the real one, and no device."""

import dataclasses
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from rl.protocol.messages import Episode, Rollout
from rl.rollout.config import EngineConfig
from rl.rollout.model_runner.shapes.buckets import bucket, decode_rows
from rl.rollout.request import Request, RequestOutput
from rl.runtime.simulated.durations import Durations
from rl.runtime.simulated.lengths import AnswerLengths

_LENGTH = 1 << 21  # tokens of the longest rollout's arrays; slices of these three are the arrays of all rollouts
_TOKENS = np.arange(_LENGTH, dtype=np.int32) % 61 + 3
_LOGPROBS, _ACTIONS = np.full(_LENGTH, -1.0, np.float32), np.ones(_LENGTH, bool)
_LONG = 1024  # tokens: of longer answers, each token of the arrays stands for several
_GRAIN = 64
_UNREAD = Episode(answer="")  # nobody decodes the text of such a rollout
_HORIZON = 20.0  # seconds of one step: leases are renewed, and newer weights are looked for, between steps

Work = Callable[[float], None]
Now = Callable[[], tuple[float, float]]


def grain_of(cfg: EngineConfig[Any]) -> int:
    """Return the tokens for which one in the arrays of a simulated rollout stands: digests of all would take hours."""
    return 1 if cfg.max_new_tokens <= _LONG else _GRAIN


@dataclasses.dataclass(slots=True)
class _Row:
    """A rollout that is drawn."""

    number: int
    request: Request
    sample: int
    target: int  # tokens at its end
    drawn: list[tuple[int, int]]  # runs of tokens by version, as of the engine's step `since`
    count: int  # tokens, as of then
    since: int = 0

    def draw(self, until: int, version: int) -> None:
        """Add the tokens of the steps until this one, drawn by a version."""
        if steps := until - self.since:
            before = self.drawn.pop()[1] if self.drawn and self.drawn[-1][0] == version else 0
            self.drawn.append((version, before + steps))
            self.count, self.since = self.count + steps, until

    def rollout(self, longest: int, grain: int, *, cut: bool = False) -> Rollout:
        """Return what is drawn; `grain`: tokens of each in the arrays."""
        counts = [-(-count // grain) for _, count in self.drawn]
        size = sum(counts)
        return Rollout(
            self.request.prompt.id,
            self.sample,
            _TOKENS[(first := self.sample % 61) : first + size],
            _LOGPROBS[:size],
            np.repeat(np.array([version for version, _ in self.drawn], np.int32), counts),
            _ACTIONS[:size],
            "abort" if cut else "length" if self.count >= longest else "stop",
            episode=_UNREAD,
        )


class SimulatedEngine:
    """The part of `RolloutEngine` that a worker calls.

    Attributes:
        version: version of its weights; -1: it has none.
        busy_seconds: seconds in which it drew.
        slow: factor of its durations: a slow host.
    """

    def __init__(self, cfg: EngineConfig[Any], durations: Durations, lengths: AnswerLengths, work: Work, now: Now):
        """Take sizes and durations.

        Args:
            cfg: config of the real engine.
            lengths: tokens of the answers.
            work: lets the seconds of a computation pass, longer where others compute on the same cores.
            now: returns the time, and the share of updates that are done.
        """
        self.cfg, self._durations, self._lengths, self._work, self._now = cfg, durations, lengths, work, now
        self.version, self.busy_seconds, self.slow, self._grain = -1, 0.0, 1.0, grain_of(cfg)
        self.runner = SimpleNamespace(kernel_choice={})
        self.executor: Any = SimpleNamespace(leaving=False, close=lambda: None)
        self._sizes = decode_rows(cfg.max_num_seqs)
        self._queue = deque[_Row]()
        self._rows: list[tuple[int, int, _Row]] = []  # heap of (step of its end, order, row) of those that are drawn
        self._order, self._steps, self._context = itertools.count(), 0, 0  # steps so far; tokens that rows have cached
        self._requests: dict[int, tuple[Request, dict[int, Rollout]]] = {}
        self._submitted, self._tokens, self._prefilled = 0, 0, set[int]()

    def set_weights(self, placed: Any, version: int, *, swap: str = "keep_cache", rewind: bool = False) -> None:
        """Switch to a version."""
        self._work(self._durations.swap)
        for _, _, row in self._rows:
            row.draw(self._steps, self.version)
        self.version = version
        self._prefilled.clear()

    def invalidate_weights(self) -> None:
        """Forget which version the weights in place are."""
        self.version = -1

    def submit(self, request: Request) -> int:
        """Queue a request; returns its number."""
        number, self._submitted = self._submitted, self._submitted + 1
        partial = {rollout.sample_id: rollout for rollout in request.partial}
        whole = {n: one for n, one in partial.items() if one.finish_reason in ("stop", "length")}
        self._requests[number] = request, whole
        progress = self._now()[1]
        for sample in partial or range(request.samples):
            if sample in whole:
                continue
            length = self._lengths.of(request.prompt.id, request.prompt.draw, sample, progress)
            drawn = Counter(partial[sample].versions.tolist()) if sample in partial else {}
            drawn = [(version, tokens * self._grain) for version, tokens in sorted(drawn.items())]
            count = sum(tokens for _, tokens in drawn)
            self._queue.append(_Row(number, request, sample, max(length, count + 1), drawn, count))
        return number

    def abort(self, number: int) -> None:
        """End a request."""
        self._queue = deque(row for row in self._queue if row.number != number)
        for one in [one for one in self._rows if one[2].number == number]:
            self._rows.remove(one)
            self._take(one[2])
        heapq.heapify(self._rows)
        self._requests.pop(number, None)

    def abort_all(self) -> list[RequestOutput]:
        """End all requests, and return what they have."""
        for row in (*(row for _, _, row in self._rows), *self._queue):
            if row not in self._queue:
                self._take(row)
            self._requests[row.number][1][row.sample] = row.rollout(self.cfg.max_new_tokens, self._grain, cut=True)
        self._rows, self._queue = [], deque()
        return [self._output(number) for number in list(self._requests)]

    def step(self) -> list[RequestOutput]:
        """Draw until a request ends, or for a while; returns the requests that have ended."""
        d, seconds, ended = self._durations, 0.0, False
        while not ended:
            seconds += self._admit()
            if not self._rows or seconds >= _HORIZON:
                break
            count = len(self._rows)
            each = d.decode_step + d.decode_row * bucket(count, self._sizes) + d.decode_context * self._context
            steps = self._rows[0][0] - self._steps
            if each > 0:
                steps = max(1, min(steps, int((_HORIZON - seconds) / each)))
            seconds += steps * (each + d.decode_context * count * (steps - 1) / 2)
            self._steps += steps
            self._context += steps * count
            self._tokens += steps * count
            while self._rows and self._rows[0][0] <= self._steps:
                ended |= self._finish(heapq.heappop(self._rows)[2])
        self._work(seconds * self.slow)
        self.busy_seconds += seconds * self.slow
        done = [n for n, (request, found) in self._requests.items() if len(found) >= _wanted(request)]
        return [self._output(number) for number in done]

    def stats(self) -> dict[str, float]:
        """Return what a worker counts."""
        return {"generation_tokens": self._tokens}

    def _admit(self) -> float:
        """Let requests in while there is room; returns the seconds of their prompts."""
        d, seconds = self._durations, 0.0
        while self._queue and len(self._rows) < self.cfg.max_num_seqs:
            row = self._queue.popleft()
            row.since, prompt = self._steps, len(row.request.prompt.tokens)
            heapq.heappush(self._rows, (self._steps + row.target - row.count, next(self._order), row))
            self._context += row.count + prompt
            if row.number not in self._prefilled:
                self._prefilled.add(row.number)
                seconds += d.lease * (row.sample == 0) + d.prefill_token * prompt
        return seconds

    def _finish(self, row: _Row) -> bool:
        """Keep a rollout that is all there; returns True if it was the last one of its request."""
        self._take(row)
        request, found = self._requests[row.number]
        found[row.sample] = row.rollout(self.cfg.max_new_tokens, self._grain)
        return len(found) >= _wanted(request)

    def _take(self, row: _Row) -> None:
        row.draw(self._steps, self.version)
        self._context -= row.count + len(row.request.prompt.tokens)

    def _output(self, number: int) -> RequestOutput:
        _, found = self._requests.pop(number)
        return RequestOutput(number, tuple(found[sample] for sample in sorted(found)))


def _wanted(request: Request) -> int:
    return len(request.partial) or request.samples
