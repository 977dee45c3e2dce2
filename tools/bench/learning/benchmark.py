"""`axl bench learning`: curves of every objective from one supervised start, over seeds; resumed where it was killed.

Each (run, seed) is a run directory of `axl rl` in the benchmark's folder, beside the supervised start that all share. A
run that has ended is read, not repeated, so the figures of a part are there at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.config import to_text
from axlearn_like.run.directory import same_run
from axlearn_like.training.trainer import Trainer
from mesh.errors import UserError, did_you_mean
from rl.runtime.run import RLRun
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import Say
from tools.bench.learning.figures import Outcome, read_outcome, summarise
from tools.bench.learning.job import RUNS, SECTIONS, START, TEACHER, learning_job, supervised_start, teacher

BENCHMARK = "learning"


def find_runs(names: Iterable[str]) -> list[str]:
    """Return the runs of these names, of runs or of sections; all without names.

    Raises:
        UserError: a name is neither.
    """
    known, chosen = [*SECTIONS, *RUNS], set[str]()
    for name in names:
        if name not in known:
            raise UserError(f"benchmark {BENCHMARK} has no run or section {name!r}{did_you_mean(name, known)}")
        chosen.update(SECTIONS.get(name, (name,)))
    return [name for name in RUNS if not chosen or name in chosen]


def run(
    names: Sequence[str], seeds: int, steps: int, say: Say, *, folder: Path, quick: bool = False, measure: bool = True
) -> dict[str, Any]:
    """Make the runs that have not ended, seed by seed, and return everything that `--json` prints.

    Args:
        names: names of runs.
        seeds: seeds of each run: 0, 1, ...
        steps: batches of a run.
        say: called with one line about progress.
        folder: where the runs live; the same call goes on there.
        quick: supervised runs of a few steps.
        measure: make the runs; False: read those that have ended.
    """
    where = machine()
    folder = folder.expanduser().absolute()
    complete = not measure or make_runs(names, seeds, steps, say, folder=folder, quick=quick)
    found: dict[str, dict[int, Outcome]] = {}
    for name in names:
        for seed in range(seeds):
            outcome = read_outcome(run_path(folder, name, seed), steps)
            if outcome is not None:
                found.setdefault(name, {})[seed] = outcome
    missing = [f"{name}, seed {seed}" for name in names for seed in range(seeds) if seed not in found.get(name, {})]
    return {
        "bench": BENCHMARK,
        "steps": steps,
        "seeds": seeds,
        "quick": quick,
        **summarise(found),
        "errors": {} if complete and not missing else dict.fromkeys(missing, "has not ended"),
        "machine": where,
        **circumstances(),
    }


def make_runs(names: Sequence[str], seeds: int, steps: int, say: Say, *, folder: Path, quick: bool) -> bool:
    """Make what is not there yet; False if SIGTERM or Ctrl-C ended it before the last one."""
    import jax

    if not _supervised(folder / TEACHER, teacher(4) if quick else teacher(), say):
        return False
    if not _supervised(folder / START, supervised_start(folder, **({"steps": 4} if quick else {})), say):
        return False
    for seed in range(seeds):
        for name in names:
            path, cfg = run_path(folder, name, seed), learning_job(name, seed=seed, steps=steps, folder=folder)
            if _ended(path, to_text(cfg)):
                continue
            say(f"{name}, seed {seed}")
            if RLRun(cfg.build(), say=lambda line: None).run(path, runtime="inprocess") is None:
                say("stopped; the same command goes on")
                return False
            jax.clear_caches()  # programs of a run are its own: dozens of runs would keep them all
    return True


def run_path(folder: Path, name: str, seed: int) -> Path:
    """Return the directory of a run."""
    return folder / "runs" / f"{name}-seed{seed}"


def _supervised(path: Path, cfg: Trainer.Config, say: Say) -> bool:
    """Train a supervised policy unless it is there; False if it was stopped."""
    say(f"supervised: {path.name}")
    return bool(Trainer(cfg).run(path, progress=False)["finished"])


def _ended(path: Path, config: str) -> bool:
    """Return True if a run with this config has ended here."""
    recorded = path / "config.txt"
    return (path / "report.json").exists() and recorded.exists() and same_run(recorded.read_text(), config)
