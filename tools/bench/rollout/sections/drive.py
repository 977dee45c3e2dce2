"""Drivers of an engine (a queue until it is empty, or a closed loop of requests), and counters of its dispatches."""

import dataclasses
from collections.abc import Iterator, Sequence
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


def closed_loop(engine: RolloutEngine, requests: Iterator[Request], *, concurrent: int, warm: int, count: int) -> Spent:
    """Keep `concurrent` requests under way, submitting the next whenever one ends; return the time of a window.

    The window opens when `warm` have ended and closes when `count` more have: it excludes the start, when all begin at
    once, and the emptying of the queue. Requests still under way then are aborted.
    """
    under_way = {engine.submit(next(requests)) for _ in range(concurrent)}
    meter, opened, ended = Meter(engine), False, 0
    while ended < warm + count:
        for one in engine.step():
            if one.number in under_way:  # requests that were under way before do not count
                under_way.remove(one.number)
                under_way.add(engine.submit(next(requests)))
                ended += 1
        if not opened and ended >= warm:
            meter, opened, warm = Meter(engine), True, ended
    spent = meter.read()
    for number in under_way:
        engine.abort(number)
    while under_way:
        under_way -= {one.number for one in engine.step()}
    return spent


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
        self._runner: Any = engine.runner
        self._executor: Any = engine.executor
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

        def watched_prefill(chosen: Any) -> Any:
            self.prefills += 1
            return prefill(chosen)

        self._executor.decode, self._executor.prefill = watched_decode, watched_prefill
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        del self._executor.decode, self._executor.prefill  # the class's methods are visible again

    @property
    def decodes(self) -> list[Dispatch]:
        """Return the decoding dispatches so far, all of them done."""
        return [Dispatch(sequences, rows, int(steps), took) for sequences, rows, steps, took in self._decodes]
