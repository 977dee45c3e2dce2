"""A rollout engine whose dispatches are durations: requests, rows and versions as in the real one, and no device."""

import dataclasses
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from rl.protocol.messages import Episode, Rollout
from rl.rollout.config import EngineConfig
from rl.rollout.request import Request, RequestOutput
from rl.runtime.simulated.durations import Durations
from rl.runtime.simulated.lengths import AnswerLengths

_TOKENS = np.arange(1 << 21, dtype=np.int32) % 61 + 3  # slices of it are the tokens of all rollouts
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
    """A rollout that is drawn; `drawn`: runs of tokens by version."""

    number: int
    request: Request
    sample: int
    target: int
    drawn: list[tuple[int, int]]
    count: int

    def rollout(self, longest: int, grain: int, *, cut: bool = False) -> Rollout:
        """Return what is drawn; `grain`: tokens of each in the arrays."""
        numbers, counts = [version for version, _ in self.drawn], [-(-count // grain) for _, count in self.drawn]
        size = sum(counts)
        return Rollout(
            self.request.prompt.id,
            self.sample,
            _TOKENS[self.sample % 61 :][:size],
            np.broadcast_to(np.float32(-1.0), size),
            np.repeat(np.array(numbers, np.int32), counts),
            np.broadcast_to(np.True_, size),
            "abort" if cut else "length" if self.count >= longest else "stop",
            episode=_UNREAD,
        )


class SimulatedEngine:
    """The part of `RolloutEngine` that a worker calls.

    Attributes:
        cfg: sizes.
        version: version of its weights; -1: it has none.
        busy_seconds: seconds in which it drew.
        slow: factor of its durations: a slow host.
    """

    def __init__(self, cfg: EngineConfig[Any], durations: Durations, lengths: AnswerLengths, work: Work, now: Now):
        """Take sizes and durations.

        Args:
            cfg: config of the real engine.
            durations: seconds of its dispatches.
            lengths: tokens of the answers.
            work: lets the seconds of a computation pass, longer where others compute on the same cores.
            now: returns the time, and the share of updates that are done.
        """
        self.cfg, self._durations, self._lengths, self._work, self._now = cfg, durations, lengths, work, now
        self.version, self.busy_seconds, self.slow, self._grain = -1, 0.0, 1.0, grain_of(cfg)
        self.runner = SimpleNamespace(kernel_choice={})
        self.executor: Any = SimpleNamespace(leaving=False, close=lambda: None)
        self._queue, self._rows = deque[_Row](), list[_Row]()
        self._requests: dict[int, tuple[Request, dict[int, Rollout]]] = {}
        self._submitted, self._tokens, self._prefilled = 0, 0, set[int]()

    def set_weights(self, placed: Any, version: int, *, swap: str = "keep_cache", rewind: bool = False) -> None:
        """Switch to a version."""
        del placed, swap, rewind
        self._work(self._durations.swap)
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
        for sample in partial or range(request.samples):
            if sample in whole:
                continue
            tokens = partial[sample].versions if sample in partial else np.empty(0, np.int32)
            length = self._lengths.of(request.prompt.id, request.prompt.draw, sample, self._now()[1])
            versions, counts = np.unique(tokens, return_counts=True)
            drawn = list(zip(versions.tolist(), (counts * self._grain).tolist(), strict=True))
            count = len(tokens) * self._grain
            self._queue.append(_Row(number, request, sample, max(length, count + 1), drawn, count))
        return number

    def abort(self, number: int) -> None:
        """End a request."""
        self._queue = deque(row for row in self._queue if row.number != number)
        self._rows = [row for row in self._rows if row.number != number]
        self._requests.pop(number, None)

    def abort_all(self) -> list[RequestOutput]:
        """End all requests, and return what they have."""
        for row in (*self._rows, *self._queue):
            self._requests[row.number][1][row.sample] = row.rollout(self.cfg.max_new_tokens, self._grain, cut=True)
        self._rows, self._queue = [], deque()
        return [self._output(number) for number in list(self._requests)]

    def step(self) -> list[RequestOutput]:
        """Draw until a rollout ends, or for a while; returns the requests that have ended."""
        d, seconds = self._durations, 0.0
        while self._queue and len(self._rows) < self.cfg.max_num_seqs:
            self._rows.append(row := self._queue.popleft())
            if row.number not in self._prefilled:
                self._prefilled.add(row.number)
                seconds += d.lease * (row.sample == 0) + d.prefill_token * len(row.request.prompt.tokens)
        if rows := self._rows:
            context = sum(row.count + len(row.request.prompt.tokens) for row in rows)
            each = d.decode_step + d.decode_row * len(rows) + d.decode_context * context
            steps = min(row.target - row.count for row in rows)
            if each > 0:
                steps = max(1, min(steps, int(_HORIZON / each)))
            seconds += steps * (each + d.decode_context * len(rows) * (steps - 1) / 2)
            for row in rows:
                row.count += steps
                if row.drawn and row.drawn[-1][0] == self.version:
                    row.drawn[-1] = self.version, row.drawn[-1][1] + steps
                else:
                    row.drawn.append((self.version, steps))
            self._tokens += steps * len(rows)
        self._work(seconds * self.slow)
        self.busy_seconds += seconds * self.slow
        for row in [row for row in rows if row.count >= row.target]:
            self._requests[row.number][1][row.sample] = row.rollout(self.cfg.max_new_tokens, self._grain)
        self._rows = [row for row in rows if row.count < row.target]
        ended = [n for n, (request, found) in self._requests.items() if len(found) >= _wanted(request)]
        return [self._output(number) for number in ended]

    def stats(self) -> dict[str, float]:
        """Return what a worker counts."""
        return {"generation_tokens": self._tokens}

    def _output(self, number: int) -> RequestOutput:
        _, found = self._requests.pop(number)
        return RequestOutput(number, tuple(found[sample] for sample in sorted(found)))


def _wanted(request: Request) -> int:
    return len(request.partial) or request.samples
