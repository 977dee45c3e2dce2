"""Durations of a run whose roles shared the cores of one host: those with which its simulation takes as long as it did.

An event's seconds have the waits for others' cores in them, so they are no durations. CPU seconds have not, so what the
log has of them is right as it is. The run is simulated, and each other duration is scaled by what its events took
over what they take there, until they agree. The time of an update that nothing explains is other processes' work.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.config import from_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from axlearn_like.run.scratch import scratch
from mesh import UserError
from rl.experiment import RLExperiment
from rl.rollout.model_runner.shapes.buckets import bucket, decode_rows
from rl.runtime.simulated.durations import Durations, calm_intervals, mean_of, measured, timed
from rl.runtime.simulated.lengths import AnswerLengths, read_lengths
from rl.runtime.simulated.simulation import SimulationPlan, simulate

_ROUNDS = 8
_CALLS = 3  # calls of the controller for a lease: for it, when its rollouts exist, and with them
_UPDATES = 40  # updates of each simulation
# Duration -> the events that it takes most of.
_EVENTS = {"decode_step": "generate", "update": "update", "score": "score", "push": "push", "pull": "pull"}


def calibrated_run(run: Path, cores: float) -> Durations:
    """Return the durations of a finished run, by its own config and lengths (UserError: it is no run of RL)."""
    cfg = from_text(RunDirectory.attach(run).read_config())
    if not isinstance(cfg, RLExperiment.Config):
        raise UserError(f"{run}: expected the run of an RL experiment")
    return calibrated(run, cfg, cores, read_lengths(str(run), cfg.max_new_tokens, cfg.seed))


def calibrated(run: Path, cfg: RLExperiment.Config, cores: float, lengths: AnswerLengths) -> Durations:
    """Return the durations by which a run of this config took as long on so many cores (UserError: no updates)."""
    rows, metrics = read_rows(run / "events.jsonl"), read_rows(run / "metrics.jsonl")
    found = dataclasses.replace(measured(run), cores=cores)
    wanted, period = _seconds(rows), period_of(metrics, len(metrics) // 3)
    if any(row["event"] == "kill" for row in rows):
        period = mean_of(calm_intervals(rows))
    if not period:
        raise UserError(f"{run}: expected a run with updates to calibrate by")
    found, known = _on_cores(rows, found, cfg)
    plan = SimulationPlan(cfg.clone(num_steps=_UPDATES, evaluation=None, evaluate_every=None), found, lengths)
    for _ in range(_ROUNDS):
        with scratch("simulate") as folder:
            there = simulate(dataclasses.replace(plan, durations=found), folder / "run")
        took = _seconds(there.events.rows)
        changes = {
            name: getattr(found, name) * wanted[event] / took[event]
            for name, event in _EVENTS.items()
            if name not in known and wanted[event] and took[event]
        }
        late = period - period_of(there.trainer_log.rows, _UPDATES // 3)
        if "update_rest" not in known:
            changes["update_rest"] = max(0.0, found.update_rest + late / 2)
        else:  # other processes of the host, and what it costs to share cores
            more = late * cores / 2 / (cfg.prompts_per_step * cfg.samples_per_prompt)
            changes["rollout_rest"] = max(0.0, found.rollout_rest + more)
        found = dataclasses.replace(found, **changes)
    return found


def _on_cores(rows: Sequence[Mapping[str, Any]], found: Durations, cfg: Any) -> tuple[Durations, set[str]]:
    """Return durations by the CPU seconds of processes, and their names; `cfg`: the experiment.

    The CPU seconds of an event do not depend on what else computes. Undisturbed it takes that many, over the most
    cores that one of its kind has used. What a process spends between two events takes one core. What grows with a
    lease's rollouts is known if leases differ in size. There are none of runs before CPU seconds were logged, nor of
    runs whose roles share a process.
    """
    pids = {row["role"]: row["pid"] for row in rows if row["event"] == "start" and "pid" in row}
    rows = [row for row in rows if row.get("cpu")]
    if not rows or len({*pids.values()}) < len(pids):
        return found, set()
    known = {"update_cores": _cores(rows, "update"), "decode_cores": _cores(rows, "generate")}
    updates, drawn = timed(rows, "update"), timed(rows, "generate")
    drawn += timed(rows, "evaluate")
    known["update"] = mean_of([row["cpu_seconds"] for row in updates]) / known["update_cores"]
    sizes, between = [row["rollouts"] for row in drawn], _between(rows, "generate", "evaluate")
    tokens = sum(row["tokens"] for row in drawn) / sum(sizes)
    dispatched = [bucket(size, decode_rows(cfg.engine.max_num_seqs)) for size in sizes]
    fixed, each = _line(dispatched, [row["cpu_seconds"] / tokens / known["decode_cores"] for row in drawn])
    known |= {"decode_step": fixed, "decode_row": each}
    fixed, each = _line([size for size, _ in between], [seconds for _, seconds in between])
    known |= {"call": fixed / _CALLS, "lease": each * cfg.samples_per_prompt / known["decode_cores"]}
    known["update_rest"] = max(0.0, mean_of([seconds for _, seconds in _between(rows, "update")]) - found.push)
    consumed = [row for row in rows if row["event"] == "consumed"]
    if len(consumed) > 1:
        spent = consumed[-1]["cpu"] - consumed[0]["cpu"]
        known["rollout_rest"] = max(0.0, spent) / (len(consumed) - 1) * len(updates) / max(sum(sizes), 1)
    return dataclasses.replace(found, **known), {*known}


def _cores(rows: Sequence[Mapping[str, Any]], event: str) -> float:
    """Return the most cores that an event of a kind has used, but for the very short ones."""
    spent = timed(rows, event)
    mean = mean_of([row["seconds"] for row in spent])
    return max(row["cpu_seconds"] / row["seconds"] for row in spent if row["seconds"] > mean / 4)


def _between(rows: Sequence[Mapping[str, Any]], *events: str) -> list[tuple[float, float]]:
    """Return a process's CPU seconds between such events, others' aside, with the rollouts of the first."""
    ends, since, found = dict[str, tuple[float, float]](), dict[str, float](), list[tuple[float, float]]()
    for row in (row for row in rows if "cpu_seconds" in row):
        role = row["role"]
        since[role] = since.get(role, 0.0) + row["cpu_seconds"]
        if row["event"] in events:
            if role in ends and (seconds := row["cpu"] - ends[role][1] - since[role]) >= 0:
                found.append((ends[role][0], seconds))
            ends[role], since[role] = (row.get("rollouts", 1), row["cpu"]), 0.0
    return found[len(found) // 3 :]


def _line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return what is the same for each size, and what each unit of size adds; all the same if sizes do not differ."""
    groups = {size: mean_of([y for x, y in zip(sizes, seconds, strict=True) if x == size]) for size in set(sizes)}
    if len(groups) < 2:
        return max(groups.values(), default=0.0), 0.0
    low, high = min(groups), max(groups)
    each = max(0.0, (groups[high] - groups[low]) / (high - low))
    return max(0.0, groups[low] - each * low), each


def period_of(rows: Sequence[Mapping[str, Any]], first: int) -> float:
    """Return the mean seconds between updates by rows of metrics, from row `first` on; 0: there are too few."""
    rows = [row for row in rows if row.get("phase") == "rl"][first:]
    return (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1) if len(rows) > 1 else 0.0


def _seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {event: mean_of([row["seconds"] for row in timed(rows, event)]) for event in _EVENTS.values()}
