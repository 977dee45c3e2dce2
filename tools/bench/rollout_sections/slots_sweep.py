"""Throughput and latency by concurrency: as many requests at a time as the engine has slots, in a closed loop.

Prompts as in the comparison with peers; completions of all lengths from half to one and a half times its 64 tokens, so
that requests do not end in step. A client hears of tokens dispatch by dispatch, so the time to the first token is about
that of one dispatch: `steps_per_dispatch` trades it against throughput. A client's next request comes when the last one
was handed out, a turn after its last token; so in this closed loop rows idle that a queue would fill.
"""

import itertools
from typing import Any

import numpy as np

from tools.bench.rollout_sections.bed import Bed, after_warm_up
from tools.bench.rollout_sections.drive import Loop, closed_loop

_LEAST_REQUESTS = 100  # so that a 99th percentile means something


def measure(bed: Bed) -> dict[str, Any]:
    """The key `slots_sweep`, one entry for each number of slots."""
    sweep = (1, 4) if bed.quick else (1, 2, 4, 8, 16, 32, 64, 128)
    points = [_point(bed, slots) for slots in sweep]
    return {
        "slots_sweep": [point for point, _ in points],
        "warm_compiles": sum(compiled for _, compiled in points),
    }


def _point(bed: Bed, slots: int) -> tuple[dict[str, Any], int]:
    mean, prompt = bed.job.new_tokens, bed.job.prompt_tokens
    engine = bed.engine(slots=slots, max_prompt=prompt, max_new=mean + mean // 2)
    count = 2 * slots if bed.quick else max(_LEAST_REQUESTS, 8 * slots)

    def run() -> Loop:
        lengths = np.random.default_rng(slots).integers(mean // 2, mean + mean // 2, 4 * slots, endpoint=True).tolist()
        requests = (bed.request(length, prompt_tokens=prompt) for length in itertools.cycle(lengths))
        return closed_loop(engine, requests, concurrent=slots, warm=slots, count=count)

    (loop,), compiled = after_warm_up(1, run)
    return {
        "slots": slots,
        "requests": len(loop.latency_s),
        **loop.spent.figures(),
        "latency_ms": _percentiles(loop.latency_s),
        "first_token_ms": _percentiles(loop.first_token_s),
    }, compiled


def _percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{percent}": 1e3 * float(np.percentile(seconds, percent)) for percent in (50, 95, 99)}
