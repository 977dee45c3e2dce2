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
from collections.abc import Mapping, Sequence
from typing import Any

import jax
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
    sigma: float = 1.0  # standard deviation of the logarithm
    shortest: int = 16
    longest: int = 512
    requests: int = 256
    max_num_seqs: int = 64
    seed: int = 0

    def lengths(self) -> list[int]:
        """Return the lengths in order of arrival."""
        drawn = np.random.default_rng(self.seed).lognormal(np.log(self.median), self.sigma, self.requests)
        return np.clip(np.rint(drawn), self.shortest, self.longest).astype(int).tolist()


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the keys `continuous_over_*static` and `long_tail`; medians over rounds."""
    bed = Bed(quick=quick)
    tail = Tail(median=12, shortest=4, longest=40, requests=24, max_num_seqs=8) if quick else Tail()
    lengths = tail.lengths()
    engine = bed.engine(
        max_num_seqs=tail.max_num_seqs, max_prompt_tokens=bed.job.prompt_tokens, max_new_tokens=tail.longest
    )

    def run() -> dict[str, Any]:
        ways, row_steps = _ways(bed, engine, tail, lengths)
        return figures(ways, row_steps, _by_position(bed, engine, tail), lengths, tail.max_num_seqs)

    rounds, compiled = after_warm_up(1 if quick else 3, run)
    middle = jax.tree.map(lambda *values: statistics.median(values), *rounds)
    about = {**dataclasses.asdict(tail), "needed_tokens": sum(lengths), "mean": statistics.mean(lengths)}
    ratios = {f"continuous_over_{static.removeprefix('plain_')}": middle.pop(static) for static in STATIC}
    return {**ratios, "long_tail": {**about, **middle}, "warm_compiles": compiled}


def figures(
    ways: Mapping[str, Spent],
    row_steps: Mapping[str, float],
    by_position: Sequence[float],
    lengths: Sequence[int],
    max_num_seqs: int,
) -> dict[str, Any]:
    """Return the figures of one round. Ratios are per token: a steady-state window draws more or fewer than needed.

    Args:
        ways: time and tokens of each way.
        row_steps: row-steps of each way per token needed.
        by_position: CPU seconds of the token at each position, in a full batch of equal contexts.
        lengths: needed tokens of each request.
        max_num_seqs: rows of a full batch.
    """
    step = statistics.mean(by_position) * max_num_seqs
    bound = sum(lengths) / max_num_seqs * step
    uniform = sum(sum(by_position[:length]) for length in lengths)
    cost = {way: spent.cpu_s / spent.tokens for way, spent in ways.items()}
    each = {
        way: {
            **dataclasses.asdict(spent),
            "over_bound": cost[way] * sum(lengths) / bound,
            "over_uniform_bound": cost[way] * sum(lengths) / uniform,
            "row_steps_per_token": row_steps.get(way),
        }
        for way, spent in ways.items()
    }
    over = {static: {way: cost[static] / cost[way] for way in CONTINUOUS} for static in STATIC}
    return {"step_cpu_ms": 1e3 * step, "bound_cpu_s": bound, "uniform_bound_cpu_s": uniform, "ways": each, **over}


def _ways(
    bed: Bed, engine: RolloutEngine, tail: Tail, lengths: Sequence[int]
) -> tuple[dict[str, Spent], dict[str, float]]:
    prompt, by_length = bed.job.prompt_tokens, sorted(lengths, reverse=True)
    ways, row_steps = {}, {}
    for way, ordered, size in (
        ("plain_static", lengths, tail.max_num_seqs),
        ("compacting_static", lengths, tail.max_num_seqs),
        ("compacting_static_longest_first", by_length, tail.max_num_seqs),
        ("fifo", lengths, len(lengths)),
        ("longest_first", by_length, len(lengths)),
    ):
        parts = itertools.batched(ordered, size)
        limits = [[max(part)] * len(part) if way == "plain_static" else part for part in parts]
        with Watch(engine) as watch:
            spent = run_queue(engine, *(bed.requests(part, prompt_tokens=prompt) for part in limits))
        ways[way] = dataclasses.replace(spent, tokens=sum(lengths)) if way == "plain_static" else spent
        row_steps[way] = sum(one.rows * one.steps for one in watch.decodes) / ways[way].tokens
    endless = (bed.request(length, prompt_tokens=prompt) for length in itertools.cycle(lengths))
    steady = closed_loop(engine, endless, concurrent=2 * tail.max_num_seqs, warm=tail.max_num_seqs, count=tail.requests)
    return {**ways, "steady": steady}, row_steps


def _by_position(bed: Bed, engine: RolloutEngine, tail: Tail) -> list[float]:
    """Return the CPU seconds of a token at each position when all rows are at this position, without prefill."""
    with Watch(engine, timed=True) as watch:
        run_queue(engine, bed.requests([tail.longest] * tail.max_num_seqs, prompt_tokens=bed.job.prompt_tokens))
    costs: list[float] = []
    for one in watch.decodes:
        assert one.took is not None
        costs += [one.took.cpu / one.steps / one.sequences] * one.steps
    return costs
