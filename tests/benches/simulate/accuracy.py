"""Section `accuracy`: real runs of several processes, predicted from the measurement of one of them alone."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from axlearn_like.run.metrics import read_rows
from axlearn_like.run.scratch import scratch
from mesh import UserError
from rl.experiment import RLExperiment
from rl.runtime.simulated.durations import Durations
from rl.runtime.simulated.failures import Failure
from rl.runtime.simulated.lengths import AnswerLengths, read_lengths
from rl.runtime.simulated.simulation import Simulation, SimulationPlan, simulate
from rl.runtime.simulated.sources.calibration import calibrated
from tests.benches.recovery.run import WatchedRun
from tests.benches.simulate.job import evaluated_job, job
from tools.bench.harness.interleave import Say

STEPS, FIRST = 132, 12  # updates of a run, and those that are not counted: they compile
_PATIENCE_S = 240.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """A configuration: `kill` is the role that is killed after two thirds of the counted updates began."""

    workers: int
    staleness: int
    kill: str = ""
    prompts: int = 2  # prompts of a lease; a batch has 8
    evaluated: bool = False  # three problems are evaluated every eight updates: in leases of two and of one

    @property
    def name(self) -> str:
        """The setting in words."""
        parts = [f"{self.workers} workers", f"staleness {self.staleness}"]
        leases = [] if self.prompts == 2 else [f"leases of {self.prompts}"]
        return ", ".join(parts + leases + ["evaluated"] * self.evaluated + [f"{self.kill} killed"] * bool(self.kill))

    def config(self) -> RLExperiment.Config:
        """Return the experiment."""
        cfg = self.job(steps=STEPS).set(workers=self.workers, staleness=self.staleness)
        return cfg.set(groups_per_lease=self.prompts)

    @property
    def job(self) -> Callable[..., RLExperiment.Config]:
        """The function of the experiment."""
        return evaluated_job if self.evaluated else job

    def words(self) -> list[str]:
        """Return the options of `axl rl`."""
        cfg = self.config()
        edits = {"num_steps": STEPS, "workers": cfg.workers, "staleness": cfg.staleness}
        edits["groups_per_lease"] = cfg.groups_per_lease or 1
        return [word for name, value in edits.items() for word in ("--set", f"{name}={value}")]


MEASURED = Setting(2, 1, evaluated=True)  # leases of two sizes: what grows with their size can be told
PREDICTED = (
    *(Setting(1, 0), Setting(1, 1), Setting(2, 0), Setting(2, 2), Setting(3, 1)),
    *(Setting(2, 1), Setting(2, 1, prompts=8), Setting(2, 1, "worker-0"), Setting(1, 1, "trainer")),
)


def accuracy(quick: bool, say: Say) -> dict[str, Any]:
    """Return the errors of the predictions, and all configurations; `quick`: the first one."""
    settings = PREDICTED[:1] if quick else PREDICTED
    with scratch("simulate") as folder:
        base = _run(MEASURED, folder / "measured", say)
        lengths = read_lengths(str(base), MEASURED.config().max_new_tokens)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        durations = calibrated(base, MEASURED.config(), cores, lengths)
        rows = [_compared(MEASURED, base, durations, lengths, say)]
        for number, setting in enumerate(settings):
            run = _run(setting, folder / str(number), say)
            rows.append(_compared(setting, run, durations, lengths, say))
        again = _compared(MEASURED, _run(MEASURED, folder / "again", say), durations, lengths, say)
    repeats = again["rollouts_per_second"][0] / rows[0]["rollouts_per_second"][0]
    known = {"configurations": [*rows, again], "durations": dataclasses.asdict(durations)}
    return scored(rows) | {"repeat_difference": abs(repeats - 1)} | known


def scored(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return mean and largest error over all rows but the first, which was measured."""
    errors = [row["rate_error"] for row in rows[1:]] + [row["staleness_error"] for row in rows[1:]]
    rates = [row["rate_error"] for row in rows[1:]]
    return {
        "error_mean": fmean(errors),
        "error_max": max(errors),
        "rate_error_mean": fmean(rates),
        "rate_error_max": max(rates),
        "fitted_error": rows[0]["rate_error"],
    }


def _run(setting: Setting, folder: Path, say: Say) -> Path:
    """Make a real run; returns its directory."""
    with WatchedRun(folder, f"{job.__module__}:{setting.job.__name__}", setting.words()) as watched:
        watched.start()
        if setting.kill:
            watched.wait_for("the kill", lambda: watched.step >= _kill_step(), _PATIENCE_S)
            watched.kill(setting.kill)
        status = watched.wait_for_end(_PATIENCE_S)
        if status:
            raise UserError(f"the run of {setting.name} ended with status {status}: {watched.said()[-500:]}")
    say(f"{setting.name}: ran")
    return folder


def _kill_step() -> int:
    return FIRST + (STEPS - FIRST) // 3


def _compared(setting: Setting, run: Path, durations: Durations, lengths: AnswerLengths, say: Say) -> dict[str, Any]:
    """Return what was measured and predicted of a setting."""
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["phase"] == "rl"]
    there = _simulated(SimulationPlan(setting.config(), durations, lengths), setting)
    real, predicted = rate_of(read_rows(run / "events.jsonl")), rate_of(there.events.rows)
    both = rows, there.trainer_log.rows
    ages = [fmean(row["staleness_mean"] for row in found if row["step"] > FIRST) for found in both]
    row = {
        "setting": setting.name,
        "rollouts_per_second": [real, predicted],
        "staleness": ages,
        "rate_error": abs(predicted / real - 1),
        "staleness_error": abs(ages[1] - ages[0]) / max(ages[0], 1.0),
    }
    say(f"{setting.name}: {real:.1f} rollouts a second, predicted {predicted:.1f}; ages {ages[0]:.2f}, {ages[1]:.2f}")
    return row


def rate_of(rows: Sequence[dict[str, Any]]) -> float:
    """Return rollouts a second, by events, from the first time of update `FIRST` to the last update, kills included."""
    rows = [row for row in rows if row["event"] == "update"]
    cfg, began = MEASURED.config(), next(row["time"] for row in rows if row["step"] == FIRST)
    return (rows[-1]["step"] - FIRST) * cfg.prompts_per_step * cfg.samples_per_prompt / (rows[-1]["time"] - began)


def _simulated(plan: SimulationPlan, setting: Setting) -> Simulation:
    """Simulate a setting; the kill comes when the run without it is at the update of the kill."""
    with scratch("simulate") as folder:
        there = simulate(plan, folder / "calm")
        if not setting.kill:
            return there
        began = there.clock.wall() - there.clock()
        when = next(row["time"] - began for row in there.trainer_log.rows if row["step"] == _kill_step())
        failing = dataclasses.replace(plan, failures=[Failure(when + 0.1, setting.kill)])
        return simulate(failing, folder / "killed")
