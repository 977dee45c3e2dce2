"""`axl bench simulate`: accuracy on real runs, the cost of planning a large run, and of the control plane itself."""

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from axlearn_like.run.scratch import scratch
from rl.runtime.simulated.durations import Durations
from rl.runtime.simulated.lengths import read_lengths
from rl.runtime.simulated.result import summarise
from rl.runtime.simulated.simulation import SimulationPlan, simulate
from tests.benches.simulate.accuracy import accuracy
from tests.benches.simulate.control import microseconds_per_rollout
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import Say
from tools.bench.harness.sections import run_sections
from tools.fleet import load_placed

SECTIONS = {"control": 40.0, "plan": 300.0, "accuracy": 420.0}
_FLEET = "trainer=v5p:8x8x8,workers=64xv5p:2x2x2"  # 512 + 512 chips
_HOURS = 12.0
# Assumptions of docs/how-to/simulate.md.
_CHIPS = Durations(
    decode_step=0.0045,
    decode_row=3e-5,
    decode_context=1.8e-8,
    prefill_token=2e-5,
    update=5.0,
    update_token=2.2e-6,
    score=0.02,
    verifiers=16.0,
    save=5.0,
    write=60.0,
)


def run(sections: Sequence[str], say: Say, *, quick: bool = False) -> dict[str, Any]:
    """Return the figures of sections, and `missing`: those that Ctrl-C has left out."""
    where = machine()  # measured before our own load
    measures: Mapping[str, Callable[[], dict[str, Any]]] = {
        "control": partial(control, quick),
        "plan": partial(plan, quick),
        "accuracy": partial(accuracy, quick, say),
    }
    found, missing = run_sections({name: measures[name] for name in sections}, say)
    about = {"bench": "simulate", "missing": missing, "machine": where, **circumstances()}
    return about | {figure: value for figures in found.values() for figure, value in figures.items()}


def control(quick: bool) -> dict[str, Any]:
    """Return CPU microseconds of one controller for a rollout, by work items in flight."""
    sizes = {32: 64, 1024: 64} if quick else {32: 64, 1024: 64, 100_000: 10_000}
    return {"control_us_per_rollout": {str(n): microseconds_per_rollout(n, workers) for n, workers in sizes.items()}}


def plan(quick: bool) -> dict[str, Any]:
    """Return the seconds that 12 hours on 1,024 chips take to simulate; `quick`: a quarter of an hour."""
    cfg = load_placed("qwq_32b_rl", (), None, (), _FLEET).cfg.set(evaluation=None)
    hours = 0.25 if quick else _HOURS
    lengths = read_lengths("lognormal:6000,0.8", cfg.max_new_tokens)
    began, cpu = time.monotonic(), time.process_time()
    with scratch("simulate") as folder:
        there = simulate(SimulationPlan(cfg, _CHIPS, lengths, hours), folder / "run")
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    found = summarise(there)
    rollouts = found["updates"] * cfg.prompts_per_step * cfg.samples_per_prompt
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "plan_s": seconds,
        "plan_cpu_s": used,
        "plan_hours": found["hours"],
        "plan_updates": found["updates"],
        "plan_us_per_rollout": 1e6 * used / max(rollouts, 1),
        "plan_peak_bytes": peak,
        "plan_bottleneck": found["bottleneck"],
    }
