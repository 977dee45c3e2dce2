"""Long-tailed lengths: savings by continuous batching, and its distance from lower bounds.

Lengths are log-normal and clipped, drawn with a fixed seed; each request ends by its own limit. Ways to run them:

* `plain_static`: as samplers without continuous batching run: `max_num_seqs` requests at a time, in order
  of arrival, and all rows are decoded until the longest has ended; then the next batch. Each request is given the
  longest limit of its batch, and only the tokens it needed count.
* `compacting_static`: the same batches by our engine: rows of ended sequences are freed and the batch
  shrinks. `compacting_static_longest_first`: longest limit first, so that batches are of about equal length.
* `fifo`: all queued at once in order of arrival, lengths unknown to the client. At the end, when the queue is
  empty, a few long ones run alone.
* `longest_first`: all queued at once, longest limit first: for a client that knows the limits are used up.
* `steady`: the queue never empties (closed loop of 2 x max_num_seqs requests, the same lengths in turn); neither start
  nor end counts. What a worker of asynchronous training sees.

Two bounds, both without prefill, host or idle rows: every token is drawn in a full batch.

* `bound`: needed tokens / max_num_seqs x seconds of a full-batch step: the mean over a batch in which all rows draw the
  longest completion, so its contexts are longer than those of the job.
* `uniform_bound`: each token at the cost of that batch's step at this token's own position: a full batch of equal
  contexts, which no mixed batch can be.

`over_bound` is CPU seconds of a way / `bound`. Row-steps are rows of the compiled shape x steps, idle or not.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.rollout.engine import RolloutEngine
from tools.bench.rollout.sections.bed import Bed, after_warm_up
from tools.bench.rollout.sections.drive import Spent, Watch, closed_loop, run_queue

STATIC = ("plain_static", "compacting_static")
CONTINUOUS = ("fifo", "longest_first", "steady")


@dataclasses.dataclass(frozen=True)
class Tail:
    """The distribution of completion lengths, in tokens."""

    median: float = 96.0
    sigma: float = 1.0  # of the logarithm
    shortest: int = 16
    longest: int = 512
    requests: int = 256
    max_num_seqs: int = 64
    seed: int = 0

    def lengths(self) -> list[int]:
        """Return the lengths in order of arrival."""
        drawn = np.random.default_rng(self.seed).lognormal(np.log(self.median), self.sigma, self.requests)
        return np.clip(np.rint(drawn), self.shortest, self.longest).astype(int).tolist()


@dataclasses.dataclass(frozen=True)
class Round:
    """Measurements of one round.

    Attributes:
        ways: time and tokens of each way.
        row_steps: row-steps of each way per token needed.
        step_cpu_s: CPU seconds of a full-batch step, mean over all positions.
        by_position: CPU seconds of the token at each position, in a full batch of equal contexts.
    """

    ways: dict[str, Spent]
    row_steps: dict[str, float]
    step_cpu_s: float
    by_position: list[float]


def measure(bed: Bed) -> dict[str, Any]:
    """Measure the keys `continuous_over_*static` and `long_tail`; medians over rounds."""
    tail = Tail(median=12, shortest=4, longest=40, requests=24, max_num_seqs=8) if bed.quick else Tail()
    engine = bed.engine(max_num_seqs=tail.max_num_seqs, max_prompt=bed.job.prompt_tokens, max_new=tail.longest)
    rounds, compiled = after_warm_up(1 if bed.quick else 3, lambda: _round(bed, engine, tail))
    lengths = tail.lengths()
    plain, compacting = (_times(rounds, way) for way in STATIC)
    return {
        "continuous_over_static": plain,
        "continuous_over_compacting_static": compacting,
        "long_tail": {
            **dataclasses.asdict(tail),
            "needed_tokens": sum(lengths),
            "mean": statistics.mean(lengths),
            "step_cpu_ms": 1e3 * statistics.median(one.step_cpu_s for one in rounds),
            "bound_cpu_s": statistics.median(_bound(one, lengths, tail) for one in rounds),
            "uniform_bound_cpu_s": statistics.median(_uniform_bound(one, lengths) for one in rounds),
            "ways": {way: _figures(rounds, way, lengths, tail) for way in rounds[0].ways},
        },
        "warm_compiles": compiled,
    }


def _times(rounds: Sequence[Round], static: str) -> dict[str, float]:
    """Return the CPU seconds per token of a static way divided by those of each continuous one."""

    def ratio(one: Round, way: str) -> float:
        return _cpu_s_per_token(one.ways[static]) / _cpu_s_per_token(one.ways[way])

    return {way: statistics.median(ratio(one, way) for one in rounds) for way in CONTINUOUS}


def _round(bed: Bed, engine: RolloutEngine, tail: Tail) -> Round:
    lengths, prompt = tail.lengths(), bed.job.prompt_tokens
    by_length = sorted(lengths, reverse=True)
    ways, row_steps = {}, {}

    def batches(ordered: Sequence[int], size: int, *, plain: bool) -> list[list[Any]]:
        parts = list(itertools.batched(ordered, size))
        limits = [[max(part)] * len(part) if plain else part for part in parts]
        return [bed.requests(part, prompt_tokens=prompt) for part in limits]

    for way, ordered, size in (
        ("plain_static", lengths, tail.max_num_seqs),
        ("compacting_static", lengths, tail.max_num_seqs),
        ("compacting_static_longest_first", by_length, tail.max_num_seqs),
        ("fifo", lengths, len(lengths)),
        ("longest_first", by_length, len(lengths)),
    ):
        with Watch(engine) as watch:
            spent = run_queue(engine, *batches(ordered, size, plain=way == "plain_static"))
        ways[way] = dataclasses.replace(spent, tokens=sum(lengths)) if way == "plain_static" else spent
        row_steps[way] = sum(one.rows * one.steps for one in watch.decodes) / ways[way].tokens

    endless = (bed.request(length, prompt_tokens=prompt) for length in itertools.cycle(lengths))
    loop = closed_loop(engine, endless, concurrent=2 * tail.max_num_seqs, warm=tail.max_num_seqs, count=tail.requests)
    ways["steady"] = loop.spent

    by_position = _by_position(bed, engine, tail)
    return Round(ways, row_steps, statistics.mean(by_position) * tail.max_num_seqs, by_position)


def _by_position(bed: Bed, engine: RolloutEngine, tail: Tail) -> list[float]:
    """Return the CPU seconds of a token at each position when all rows are at this position, without prefill."""
    with Watch(engine, timed=True) as watch:
        run_queue(engine, bed.requests([tail.longest] * tail.max_num_seqs, prompt_tokens=bed.job.prompt_tokens))
    costs: list[float] = []
    for one in watch.decodes:
        assert one.took is not None
        costs += [one.took.cpu / one.steps / one.sequences] * one.steps
    return costs


def _bound(one: Round, lengths: Sequence[int], tail: Tail) -> float:
    return sum(lengths) / tail.max_num_seqs * one.step_cpu_s


def _uniform_bound(one: Round, lengths: Sequence[int]) -> float:
    return sum(sum(one.by_position[:length]) for length in lengths)


def _cpu_s_per_token(spent: Spent) -> float:
    return spent.cpu_s / spent.tokens


def _figures(rounds: Sequence[Round], way: str, lengths: Sequence[int], tail: Tail) -> dict[str, Any]:
    """Return the figures of one way. Ratios are per token: a steady-state window draws more or fewer than needed."""
    each = [(one.ways[way], one) for one in rounds]
    needed = sum(lengths)

    def over(bound: float, spent: Spent) -> float:
        return _cpu_s_per_token(spent) * needed / bound

    return {
        "cpu_s": statistics.median(spent.cpu_s for spent, _ in each),
        "wall_s": statistics.median(spent.wall_s for spent, _ in each),
        "tokens": statistics.median(spent.tokens for spent, _ in each),
        "over_bound": statistics.median(over(_bound(one, lengths, tail), spent) for spent, one in each),
        "over_uniform_bound": statistics.median(over(_uniform_bound(one, lengths), spent) for spent, one in each),
        "row_steps_per_token": rounds[-1].row_steps.get(way),  # counted, the same in all rounds
    }
