"""Durations of a run whose roles shared the cores of one host: those with which its simulation takes as long as it did.

An event's seconds have the waits for others' cores in them, so they are no durations. The run itself is simulated, and
each duration is scaled by what its events took over what they take there, until they agree. The seconds
between updates that no event explains are the trainer's host's.
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
from rl.runtime.simulated.durations import Durations, calm_intervals, mean_of, measured, timed
from rl.runtime.simulated.lengths import AnswerLengths, read_lengths
from rl.runtime.simulated.simulation import SimulationPlan, simulate

_ROUNDS = 8
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
    """Return the durations by which a run of this config took the time that it did, on so many cores.

    Raises:
        UserError: the run has nothing to measure.
    """
    rows, metrics = read_rows(run / "events.jsonl"), read_rows(run / "metrics.jsonl")
    found = dataclasses.replace(measured(run), cores=cores)
    wanted, period = _seconds(rows), period_of(metrics, len(metrics) // 3)
    if any(row["event"] == "kill" for row in rows):
        period = mean_of(calm_intervals(rows))
    if not period:
        raise UserError(f"{run}: expected a run with updates to calibrate by")
    plan = SimulationPlan(cfg.clone(num_steps=_UPDATES, evaluation=None), found, lengths)
    for _ in range(_ROUNDS):
        with scratch("simulate") as folder:
            there = simulate(dataclasses.replace(plan, durations=found), folder / "run")
        took = _seconds(there.events.rows)
        changes = {
            name: getattr(found, name) * wanted[event] / took[event]
            for name, event in _EVENTS.items()
            if wanted[event] and took[event]
        }
        late = period - period_of(there.trainer_log.rows, _UPDATES // 3)
        found = dataclasses.replace(found, **changes, update_rest=max(0.0, found.update_rest + late / 2))
    return found


def period_of(rows: Sequence[Mapping[str, Any]], first: int) -> float:
    """Return the mean seconds between updates by rows of metrics, from row `first` on; 0: there are too few."""
    rows = [row for row in rows if row.get("phase") == "rl"][first:]
    return (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1) if len(rows) > 1 else 0.0


def _seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {event: mean_of([row["seconds"] for row in timed(rows, event)]) for event in _EVENTS.values()}
