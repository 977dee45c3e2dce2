"""Drivers of an engine (a queue until it is empty, or a closed loop of requests), and counters of its dispatches."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import jax

from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from tools.bench.harness.protocol import Clock, now


@dataclasses.dataclass(frozen=True)
class Spent:
    """Seconds (CPU: all threads of the process) and the tokens drawn in them."""

    cpu_s: float
    wall_s: float
    tokens: float

    def figures(self) -> dict[str, float]:
        """Return the figures for the result."""
        rates = {"tok_per_cpu_s": self.tokens / self.cpu_s, "tok_per_s": self.tokens / self.wall_s}
        return {**dataclasses.asdict(self), **rates}


class Meter:
    """A meter of an engine's time and tokens since the meter was made."""

    def __init__(self, engine: RolloutEngine):
        self._engine, self._tokens, self._start = engine, engine.stats()["generation_tokens"], now()

    def read(self) -> Spent:
        """Return the time and tokens spent so far."""
        spent = now().since(self._start)
        return Spent(spent.cpu, spent.wall, self._engine.stats()["generation_tokens"] - self._tokens)


def run_queue(engine: RolloutEngine, *batches: Sequence[Request]) -> Spent:
    """Queue each batch as a whole, when all requests of the previous batch have ended."""
    meter = Meter(engine)
    for batch in batches:
        engine.generate(batch)
    return meter.read()


@dataclasses.dataclass
class Loop:
    """A closed loop's window: time and tokens in it, and seconds for each request that ended in it."""

    spent: Spent
    latency_s: list[float]  # from `submit` until `step` returned it
    first_token_s: list[float]  # from `submit` until `on_tokens` received the first


def closed_loop(
    engine: RolloutEngine,
    requests: Iterator[Request],
    *,
    concurrent: int,
    warm: int,
    count: int,
    each_turn: Callable[[], None] = lambda: None,
) -> Loop:
    """Keep `concurrent` requests under way: whenever one ends, the next of `requests` is submitted.

    The window opens when `warm` have ended and closes when `count` more have: it excludes the start, when all begin at
    once, and the emptying of the queue. Requests still under way then are aborted.
    """
    submitted: dict[int, float] = {}  # both by request number: submission time, and seconds until the first token
    first: dict[int, float] = {}
    ended: list[tuple[float, float]] = []

    def submit() -> None:
        began = time.perf_counter()

        def on_tokens(*_: Any) -> None:
            first.setdefault(number, time.perf_counter() - began)

        number = engine.submit(next(requests), on_tokens)
        submitted[number] = began

    for _ in range(concurrent):
        submit()
    meter, opened = Meter(engine), False
    while len(ended) < warm + count:
        for one in engine.step():
            if one.number in submitted:  # not one that was under way before
                ended.append((time.perf_counter() - submitted.pop(one.number), first.pop(one.number)))
                submit()
        each_turn()
        if not opened and len(ended) >= warm:
            meter, opened, warm = Meter(engine), True, len(ended)
    spent = meter.read()
    for number in submitted:
        engine.abort(number)
    while submitted:
        for one in engine.step():
            submitted.pop(one.number, None)
    latency, first_token = zip(*ended[warm:], strict=True)
    return Loop(spent, list(latency), list(first_token))


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """One decoding dispatch: sequences in it, rows of its shape, steps it ran, and, if timed, its own time."""

    sequences: int
    rows: int
    steps: int
    took: Clock | None


class Watch:
    """A counter of an engine's dispatches inside its `with` block.

    Args:
        timed: wait for each decoding dispatch and read the clocks, at the price of overlap with the host.
    """

    def __init__(self, engine: RolloutEngine, *, timed: bool = False):
        self._runner: Any = engine._runner
        self._executor: Any = engine._core.executor
        self._timed = timed
        self._decodes: list[tuple[int, int, jax.Array, Clock | None]] = []
        self.prefills = 0

    def __enter__(self) -> Self:
        decode, prefill = self._executor.decode, self._executor.prefill

        def watched_decode(sequences: Any, **options: Any) -> dict[str, jax.Array]:
            if self._timed:
                jax.block_until_ready(self._runner.cache.pool)  # prefills and copies before it are not its own
            start = now()
            out = decode(sequences, **options)
            took = now().since(start) if self._timed and jax.block_until_ready(out) else None
            self._decodes.append((len(sequences), out["tokens"].shape[1], out["steps"], took))
            return out

        def watched_prefill(chosen: Any) -> None:
            self.prefills += 1
            prefill(chosen)

        self._executor.decode, self._executor.prefill = watched_decode, watched_prefill
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        del self._executor.decode, self._executor.prefill  # the class's methods are visible again

    @property
    def decodes(self) -> list[Dispatch]:
        """Return the decoding dispatches so far, all of them done."""
        return [Dispatch(sequences, rows, int(steps), took) for sequences, rows, steps, took in self._decodes]
