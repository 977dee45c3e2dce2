"""Time for which a change of weights interrupts decoding.

`set_weights(swap="keep_cache")` runs between two dispatches; no token is sampled until it returns. Arrays are
awaited inside it, so that the next dispatch cannot hide their placement; `turn_after_over_turn` shows that nothing
else is hidden there: the median of a turn after a change divided by that of a turn without one.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.base import Params
from rl.rollout.engine import RolloutEngine
from tools.bench.rollout.sections.bed import Bed, after_warm_up

Times = dict[str, list[float]]  # seconds of pauses, of placement in them, of turns without a change and after one


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the key `inflight_pause_ms`: the pause, its part for placing arrays, and the rest."""
    bed = Bed(quick=quick)
    max_num_seqs, new, swaps = (4, 160, 2) if bed.quick else (64, 512, 20)
    engine = bed.engine(max_num_seqs=max_num_seqs, max_prompt=bed.job.prompt_tokens, max_new=new)
    policies = [bed.params(seed) for seed in (1, 2)]
    updates = ((policies[version % 2], version) for version in itertools.count(1))

    def run() -> Times:
        times: Times = {name: [] for name in ("pause", "placing", "turn", "turn_after")}
        while len(times["pause"]) < swaps:
            _generation(bed, engine, updates, times)
        return times

    (times,), compiled = after_warm_up(1, run)
    pauses, placing = times["pause"][:swaps], times["placing"][:swaps]
    rest = [pause - part for pause, part in zip(pauses, placing, strict=True)]
    return {
        "inflight_pause_ms": {
            **_percentiles("", pauses),
            **_percentiles("placing_", placing),
            **_percentiles("rest_", rest),
            "swaps": swaps,
            "rows": max_num_seqs,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(policies[0])),
            "turn_ms": 1e3 * statistics.median(times["turn"]),
            "turn_after_over_turn": statistics.median(times["turn_after"]) / statistics.median(times["turn"]),
        },
        "warm_compiles": compiled,
    }


def _generation(bed: Bed, engine: RolloutEngine, updates: Iterator[tuple[Params, int]], times: Times) -> None:
    """Fill all rows and decode until the first row ends, with a change of weights before every other turn."""
    max_num_seqs = engine.cfg.max_num_seqs
    for request in bed.requests([engine.cfg.max_new] * max_num_seqs, prompt_tokens=bed.job.prompt_tokens):
        engine.submit(request)
    while engine.stats()["running"] < max_num_seqs:
        engine.step()
    for changed in itertools.cycle((False, True)):
        if changed:
            pause, placing = _change(engine, *next(updates))
            times["pause"].append(pause)
            times["placing"].append(placing)
        began = time.perf_counter()
        engine.step()
        if engine.stats()["running"] < max_num_seqs:
            break
        times["turn_after" if changed else "turn"].append(time.perf_counter() - began)
    engine.abort_all()


def _change(engine: RolloutEngine, params: Params, version: int) -> tuple[float, float]:
    """Return the seconds of the whole change, and of placing the arrays in it."""
    runner: Any = engine._runner
    place, placing = runner.place, []

    def timed_place(params: Params) -> Params:
        began = time.perf_counter()
        placed = jax.block_until_ready(place(params))
        placing.append(time.perf_counter() - began)
        return placed

    runner.place = timed_place
    try:
        began = time.perf_counter()
        engine.set_weights(params, version, swap="keep_cache")
        return time.perf_counter() - began, placing[0]
    finally:
        del runner.place  # the class's method is visible again


def _percentiles(prefix: str, seconds: list[float]) -> dict[str, float]:
    return {f"{prefix}p{percent}": 1e3 * float(np.percentile(seconds, percent)) for percent in (50, 99)}
