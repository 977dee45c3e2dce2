"""Throughput and latency by concurrency: as many requests at a time as `max_num_seqs`, in a closed loop.

Prompts as in the comparison with peers; completions of all lengths from half to one and a half times its 64 tokens, so
that requests do not end together. Tokens are streamed dispatch by dispatch, so the time to the first token is about
that of one dispatch: `steps_per_dispatch` trades it against throughput. A client sends its next request when the last
one was returned, a turn after its last token; so in this closed loop some rows are idle that a queue would fill.
"""

import itertools
from typing import Any

import numpy as np

from tools.bench.rollout.sections.bed import Bed, after_warm_up
from tools.bench.rollout.sections.drive import Loop, closed_loop

_LEAST_REQUESTS = 100  # so that a 99th percentile means something


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the key `concurrency_sweep`, one entry for each value of max_num_seqs."""
    bed = Bed(quick=quick)
    sweep = (1, 4) if bed.quick else (1, 2, 4, 8, 16, 32, 64, 128)
    points = [_point(bed, max_num_seqs) for max_num_seqs in sweep]
    return {
        "concurrency_sweep": [point for point, _ in points],
        "warm_compiles": sum(compiled for _, compiled in points),
    }


def _point(bed: Bed, max_num_seqs: int) -> tuple[dict[str, Any], int]:
    mean, prompt = bed.job.new_tokens, bed.job.prompt_tokens
    engine = bed.engine(max_num_seqs=max_num_seqs, max_prompt=prompt, max_new=mean + mean // 2)
    count = 2 * max_num_seqs if bed.quick else max(_LEAST_REQUESTS, 8 * max_num_seqs)

    def run() -> Loop:
        rng = np.random.default_rng(max_num_seqs)
        lengths = rng.integers(mean // 2, mean + mean // 2, 4 * max_num_seqs, endpoint=True).tolist()
        requests = (bed.request(length, prompt_tokens=prompt) for length in itertools.cycle(lengths))
        return closed_loop(engine, requests, concurrent=max_num_seqs, warm=max_num_seqs, count=count)

    (loop,), compiled = after_warm_up(1, run)
    return {
        "max_num_seqs": max_num_seqs,
        "requests": len(loop.latency_s),
        **loop.spent.figures(),
        "latency_ms": _percentiles(loop.latency_s),
        "first_token_ms": _percentiles(loop.first_token_s),
    }, compiled


def _percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{percent}": 1e3 * float(np.percentile(seconds, percent)) for percent in (50, 95, 99)}
