"""`axl bench grpo_step`: CPU seconds of one GRPO step, our stack and peers interleaved in one run."""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.harness.circumstances import machine
from tools.bench.harness.interleave import OURS, Measured, Others, Say, errors_of, measure_with_peers, ratio_over_rounds
from tools.bench.harness.processes import our_command
from tools.bench.harness.protocol import STEP_FIELDS
from tools.bench.harness.sections import run_sections
from tools.bench.harness.starts import cached_starts

BENCHMARK = "grpo_step"
OUR_WORKER = "tools.bench.grpo_step.ours"
SECTIONS = {"steps": 60.0, "warm_starts": 50.0}  # peers come on top
STARTS = 3  # starts with a warm cache; one before fills it


def summarise(results: Mapping[str, Measured], steps: int, starts: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the result that `--json` prints; `starts` are our ready lines with programs in the cache.

    The best peer is the one with the lowest median CPU seconds a step; the ratio is the median over
    rounds of our CPU seconds by the best peer's in the same round, None without both.
    """
    done = {name: result for name, result in results.items() if result.error is None}
    ours = done.get(OURS)
    peers = {name: result for name, result in done.items() if name != OURS}
    best = min(peers, key=lambda name: peers[name].median("cpu_s"), default=None)
    ratio = ratio_over_rounds(ours, peers.get(best or ""), lambda step: step["cpu_s"])
    return {
        "bench": BENCHMARK,
        "ours_cpu_s_per_step": ours and ours.median("cpu_s"),
        "ours_wall_s_per_step": ours and ours.median("wall_s"),
        "ours_gen_tok_per_cpu_s": ours and ours.median_ratio("new_tokens", "gen_cpu_s"),
        "ours_first_step_s": ours and ours.ready["first_step_s"],
        "ours_first_step_warm_s": _median(starts, "first_step_s"),
        "ours_first_step_warm_cpu_s": _median(starts, "first_step_cpu_s"),
        "ours_start_warm_s": _median(starts, "start_s"),
        "ours_version": ours and ours.ready["version"],
        "peers": {name: _figures(result) for name, result in peers.items()},
        "best_peer": best,
        "ratio_to_best_peer": ratio,
        "steps": steps,
        "parameters": {name: result.ready["parameters"] for name, result in done.items()},
        "cpu_s_by_round": {name: [s["cpu_s"] for s in r.steps] for name, r in done.items()},
        "reward_last": {name: result.steps[-1]["reward"] for name, result in done.items()},
        "errors": errors_of(results),
        "machine": machine(),
    }


def run(others: Others | None, steps: int, say: Say, sections: Sequence[str] = tuple(SECTIONS)) -> dict[str, Any]:
    """Measure our stack and others, interleaved; systems that cannot be run are listed under `errors`."""

    def warm_starts() -> Any:
        with tempfile.TemporaryDirectory(prefix="axl-bench-") as folder:
            return cached_starts({OURS: our_command(OUR_WORKER)}, Path(folder), STARTS, say)

    measures = {
        "steps": lambda: measure_with_peers(OUR_WORKER, others, steps, say, STEP_FIELDS),
        "warm_starts": warm_starts,
    }
    found, missing = run_sections({name: measures[name] for name in sections}, say)
    starts, unstarted = found.get("warm_starts", ({}, {}))
    result = summarise(found.get("steps", {}), steps, starts.get(OURS, ()))
    result["errors"] |= {f"warm start of {name}": why for name, why in unstarted.items()}
    return {**result, "missing": missing}


def _median(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return statistics.median(line[name] for line in lines) if lines else None


def _figures(result: Measured) -> dict[str, Any]:
    return {
        "cpu_s_per_step": result.median("cpu_s"),
        "wall_s_per_step": result.median("wall_s"),
        "gen_tok_per_cpu_s": result.median_ratio("new_tokens", "gen_cpu_s"),
        **{name: result.ready[name] for name in ("first_step_s", "start_s", "version")},
    }
