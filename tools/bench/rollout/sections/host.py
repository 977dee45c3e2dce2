"""Cost of the host per dispatch, on the job of the comparison with peers.

`host_ms_per_dispatch` is wall time that the engine spends outside waiting for the device, per dispatch (prefill or
decoding). On one core the device's work runs in between and is partly in it, so `main_thread_cpu_ms_per_dispatch` says
how much the thread that drives the engine computes itself: bookkeeping, packing and jax's own dispatching.
"""

import itertools
import time
from typing import Any

from tools.bench.rollout.sections.bed import Bed, after_warm_up
from tools.bench.rollout.sections.drive import Watch, run_queue


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the keys `host_ms_per_dispatch` and `host`."""
    bed = Bed(quick=quick)
    job = bed.job
    engine = bed.engine(max_num_seqs=job.rollouts, max_prompt_tokens=job.prompt_tokens, max_new_tokens=job.new_tokens)
    generations = 1 if bed.quick else 20

    def run() -> dict[str, Any]:
        requests = [
            bed.request(job.new_tokens, prompt_tokens=job.prompt_tokens, samples=job.group)
            for _ in range(generations * job.prompts)
        ]
        before, thread = engine.stats()["host_seconds"], time.thread_time()
        with Watch(engine) as watch:
            spent = run_queue(engine, *itertools.batched(requests, job.prompts))
        main_thread = time.thread_time() - thread
        decodes = len(watch.decodes)
        dispatches = decodes + watch.prefills
        return {
            "host_ms_per_dispatch": 1e3 * (engine.stats()["host_seconds"] - before) / dispatches,
            "host": {
                "main_thread_cpu_ms_per_dispatch": 1e3 * main_thread / dispatches,
                "decodes": decodes,
                "prefills": watch.prefills,
                "wall_ms_per_dispatch": 1e3 * spent.wall_s / dispatches,
                **spent.figures(),
            },
        }

    (figures,), compiled = after_warm_up(1, run)
    return {**figures, "warm_compiles": compiled}
