"""Figures of a simulated run: rates, staleness, utilisation, ETTR, cost, and the bottleneck in a sentence."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from axlearn_like.config import from_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from axlearn_like.run.scratch import scratch
from mesh import UserError
from rl.runtime.simulated.durations import calm_intervals
from rl.runtime.simulated.failures import Failure
from rl.runtime.simulated.lengths import read_lengths
from rl.runtime.simulated.simulation import Simulation, SimulationPlan, simulate
from rl.runtime.simulated.sources.calibration import calibrated_run

_WINDOWS = 10  # parts of a run whose progress is compared for the interval of the ETTR
_Z = 1.96  # quantile of a 95 % interval


def summarise(simulation: Simulation) -> dict[str, Any]:
    """Return the figures of a run; seconds and hours are simulated."""
    plan, log, seconds = simulation.plan, simulation.trainer_log, simulation.clock()
    cfg, d, hours = plan.cfg, plan.durations, seconds / 3600
    lived = sum(end - begin for spans in simulation.alive.values() for begin, end in spans)
    busy = sum(engine.busy_seconds for engines in simulation.engines.values() for engine in engines)
    utilisation = {
        "trainer": log.busy / seconds if seconds else 0.0,
        "workers": busy / lived if lived else 0.0,
        "verifier": simulation.flows.busy.get("verifier", 0.0) / (d.verifiers * seconds) if seconds else 0.0,
    }
    if d.cores is None:
        network = simulation.flows.busy.get("server:out", 0.0) / d.server_network
        utilisation["server network"] = network / seconds if seconds else 0.0
    rollouts = simulation.step * cfg.prompts_per_step * cfg.samples_per_prompt
    total = sum(log.ages.values())
    cost = d.worker_price * lived / 3600 + d.trainer_price * hours
    return {
        "hours": hours,
        "updates": simulation.step,
        "finished": simulation.finished,
        "updates_per_hour": simulation.step / hours if hours else 0.0,
        "rollouts_per_hour": rollouts / hours if hours else 0.0,
        "tokens_per_second": sum(row["gen_tokens"] for row in log.rows) / seconds if seconds else 0.0,
        "staleness": {age: count / total for age, count in sorted(log.ages.items())},
        "staleness_mean": sum(age * count for age, count in log.ages.items()) / total if total else 0.0,
        "utilisation": utilisation,
        "wait_share": sum(row["wait_seconds"] for row in log.rows) / seconds if seconds else 0.0,
        "kills": sum(row["event"] == "kill" for row in simulation.events.rows),
        "updates_redone": log.made - simulation.step,
        "cost": cost,
        "cost_per_update": cost / simulation.step if simulation.step else math.inf,
        "workers": cfg.workers,
        "staleness_bound": cfg.staleness,
        "bottleneck": bottleneck(utilisation, cfg.workers, cfg.staleness),
    }


def bottleneck(utilisation: dict[str, float], workers: int, staleness: int) -> str:
    """Name what the run waits for, in one sentence."""
    name, share = max(utilisation.items(), key=lambda item: item[1])
    others = ", ".join(f"{role} {used:.0%}" for role, used in utilisation.items() if role != name)
    if share < 0.75:
        return (
            f"No role is busy for more than {share:.0%} of the time ({name}; {others}): trainer and workers wait for "
            f"each other, which a staleness above {staleness} or smaller leases would overlap."
        )
    say = {
        "trainer": f"The trainer is the bottleneck, busy for {share:.0%} of the time",
        "workers": f"Drawing is the bottleneck: the {workers} workers are busy for {share:.0%} of the time",
        "verifier": f"The verifier is the bottleneck, busy for {share:.0%} of the time",
        "server network": f"The parameter server's network is the bottleneck, busy for {share:.0%} of the time",
    }
    return f"{say[name]} ({others})."


def simulated(plan: SimulationPlan) -> dict[str, Any]:
    """Return the figures of a plan, simulated in a directory that is deleted."""
    with scratch("simulate") as folder:
        return summarise(simulate(plan, folder / "run"))


def ettr(disturbed: Simulation) -> dict[str, Any]:
    """Return the effective training time ratio: seconds to the last update without failures, over those with them.

    The interval is of the mean over equal parts of the run, as if these were independent (95 %).
    """
    step, seconds = disturbed.step, _time_of(disturbed, disturbed.step)
    if not step:
        raise UserError("ettr: no update is made in the time of the run; expected more --hours")
    with scratch("simulate") as folder:
        calm = simulate(dataclasses.replace(disturbed.plan, failures=()), folder / "run")
    last = min(step, calm.step)
    rate = last / _time_of(calm, last)
    width = seconds / _WINDOWS
    marks = [_step_at(disturbed, width * n) for n in range(_WINDOWS + 1)]
    parts = [(after - before) / (width * rate) for before, after in zip(marks[:-1], marks[1:], strict=True)]
    error = _Z * stdev(parts) / math.sqrt(_WINDOWS)
    return {"ettr": step / rate / seconds, "ettr_interval": [max(0.0, fmean(parts) - error), fmean(parts) + error]}


def measured_ettr(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a real run's ETTR: its updates' undisturbed seconds over those that they took (UserError: too few)."""
    updates = [row for row in rows if row["event"] == "update" and row["role"] == "trainer"]
    if not (calm := calm_intervals(rows)):
        raise UserError("ettr: no two updates follow each other undisturbed; expected a longer run, or fewer failures")
    seconds = updates[-1]["time"] - updates[0]["time"]
    made = len({row["step"] for row in updates}) - 1
    figures = {"updates": made, "seconds": seconds, "kills": sum(row["event"] == "kill" for row in rows)}
    return {"ettr": made * fmean(calm) / seconds, "update_seconds": fmean(calm), **figures}


def replayed_ettr(run: Path, failures: Sequence[Failure]) -> dict[str, Any]:
    """Return the ETTR of a run with a trace, measured, and simulated with the run's own durations on this host."""
    found = measured_ettr(read_rows(run / "events.jsonl"))
    cfg: Any = from_text(RunDirectory.attach(run).read_config())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cfg = cfg.clone(evaluation=None, evaluate_every=None)
    lengths = read_lengths(str(run), cfg.max_new_tokens, cfg.seed)
    plan = SimulationPlan(cfg, calibrated_run(run, cores), lengths, found["seconds"] / 3600, failures)
    with scratch("simulate") as folder:
        return {**found, "simulated": ettr(simulate(plan, folder / "run"))["ettr"]}


def _time_of(simulation: Simulation, step: int) -> float:
    began = simulation.clock.wall() - simulation.clock()
    return max((row["time"] - began for row in simulation.trainer_log.rows if row["step"] == step), default=0.0)


def _step_at(simulation: Simulation, seconds: float) -> int:
    began = simulation.clock.wall() - simulation.clock()
    return max((row["step"] for row in simulation.trainer_log.rows if row["time"] - began <= seconds), default=0)


def in_words(found: dict[str, Any]) -> list[str]:
    """Return what was found of one fleet, or of several in their order, as lines of text."""
    if "fleets" in found:
        lines = [
            f"{row['fleet']}: {row['updates_per_hour']:.1f} updates an hour, ${row['cost_per_update']:.3g} an update. "
            f"{row['bottleneck']}"
            for row in found["fleets"]
        ]
        return lines + [f"{text} cannot run it: {why}" for text, why in found["refused"].items()]
    ends = "all updates" if found["finished"] else "the time is over"
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in found["staleness"].items())
    lines = [
        f"{found['updates']} updates in {found['hours']:.2f} h ({ends}), {found['kills']} kills",
        f"{found['updates_per_hour']:.1f} updates and {found['rollouts_per_hour']:.0f} rollouts an hour",
        f"rollouts by age in updates: {ages}",
        "busy: " + ", ".join(f"{role} {share:.0%}" for role, share in found["utilisation"].items()),
    ]
    if "ettr" in found:
        low, high = found["ettr_interval"]
        lines.append(f"ETTR {found['ettr']:.3f} (95 % of the parts: {low:.3f} to {high:.3f})")
    if found["cost"]:
        lines.append(f"${found['cost']:.2f}, ${found['cost_per_update']:.4g} an update")
    advice = [f"  {row['change']}: {row['gain']:+.1%} updates an hour" for row in found.get("advice", ())]
    return [*lines, found["bottleneck"], *advice]
