"""Figures of docs/benchmarks/learning.md: curves of every objective from one supervised start, over seeds.

    python -m tests.studies.learning.study --only staleness --seeds 1

Each (run, seed) is a run directory of `axl rl` in a folder, beside the supervised start that all share. A run that has
ended is read, not repeated, so the same command goes on where it was killed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from axlearn_like.config import to_text
from axlearn_like.run.opening import same_run
from axlearn_like.training.trainer import Trainer
from mesh.errors import UserError, did_you_mean
from mesh.programs.compilation import enable_compilation_cache
from rl.runtime.run import RLRun
from tests.studies.learning.figures import Outcome, read_outcome, summarise
from tests.studies.learning.job import RUNS, SECTIONS, START, TEACHER, learning_job, supervised_start, teacher
from tests.studies.learning.plot import write_plots
from tools.bench.harness.circumstances import circumstances, machine


def find_runs(names: Iterable[str]) -> list[str]:
    """Return the runs of these names, of runs or of sections; all without names.

    Raises:
        UserError: a name is neither.
    """
    known, chosen = [*SECTIONS, *RUNS], set[str]()
    for name in names:
        if name not in known:
            raise UserError(f"there is no run or section {name!r}{did_you_mean(name, known)}")
        chosen.update(SECTIONS.get(name, (name,)))
    return [name for name in RUNS if not chosen or name in chosen]


def run(
    names: Sequence[str], seeds: int, steps: int, *, folder: Path, quick: bool = False, measure: bool = True
) -> dict[str, Any]:
    """Make the runs that have not ended, seed by seed, and return everything that `--json` prints.

    Args:
        names: names of runs.
        seeds: seeds of each run: 0, 1, ...
        steps: batches of a run.
        folder: where the runs live; the same call goes on there.
        quick: supervised runs of a few steps.
        measure: make the runs; False: read those that have ended.
    """
    where = machine()
    folder = folder.expanduser().absolute()
    complete = not measure or make_runs(names, seeds, steps, folder=folder, quick=quick)
    found: dict[str, dict[int, Outcome]] = {}
    for name in names:
        for seed in range(seeds):
            outcome = read_outcome(run_path(folder, name, seed), steps)
            if outcome is not None:
                found.setdefault(name, {})[seed] = outcome
    missing = [f"{name}, seed {seed}" for name in names for seed in range(seeds) if seed not in found.get(name, {})]
    return {
        "bench": "learning",
        "steps": steps,
        "seeds": seeds,
        "quick": quick,
        **summarise(found),
        "errors": {} if complete and not missing else dict.fromkeys(missing, "has not ended"),
        "machine": where,
        **circumstances(),
    }


def make_runs(names: Sequence[str], seeds: int, steps: int, *, folder: Path, quick: bool) -> bool:
    """Make what is not there yet; False if SIGTERM or Ctrl-C ended it before the last one."""
    import jax

    if not _supervised(folder / TEACHER, teacher(4) if quick else teacher()):
        return False
    if not _supervised(folder / START, supervised_start(folder, **({"steps": 4} if quick else {}))):
        return False
    for seed in range(seeds):
        for name in names:
            path, cfg = run_path(folder, name, seed), learning_job(name, seed=seed, steps=steps, folder=folder)
            if _ended(path, to_text(cfg)):
                continue
            _say(f"{name}, seed {seed}")
            if RLRun(cfg.build(), say=lambda line: None).run(path, runtime="inprocess") is None:
                _say("stopped; the same command goes on")
                return False
            jax.clear_caches()  # programs of a run are its own: dozens of runs would keep them all
    return True


def run_path(folder: Path, name: str, seed: int) -> Path:
    """Return the directory of a run."""
    return folder / "runs" / f"{name}-seed{seed}"


def _supervised(path: Path, cfg: Trainer.Config) -> bool:
    """Train a supervised policy unless it is there; False if it was stopped."""
    _say(f"supervised: {path.name}")
    return bool(Trainer(cfg).run(path, progress=False)["finished"])


def _ended(path: Path, config: str) -> bool:
    """Return True if a run with this config has ended here."""
    recorded = path / "config.txt"
    return (path / "report.json").exists() and recorded.exists() and same_run(recorded.read_text(), config)


def _say(line: str) -> None:
    click.echo(line, err=True)


@click.command()
@click.option("--only", default="", help="Comma-separated runs or sections; default: all.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Seeds of each run.")
@click.option("--steps", default=40, show_default=True, type=click.IntRange(1), help="Batches of a run.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs/learning"), show_default=True)
@click.option("--no-runs", is_flag=True, help="Make no runs: report those that have ended.")
@click.option("--plot", type=click.Path(path_type=Path), help="A folder for plots (SVG).")
@click.option("--quick", is_flag=True, help="Supervised runs of a few steps: shows that all runs.")
def main(only: str, seeds: int, steps: int, folder: Path, no_runs: bool, plot: Path | None, quick: bool) -> None:
    """Print the result as one JSON object; exit status 1 if a run has not ended."""
    chosen = find_runs([name for name in only.split(",") if name])
    enable_compilation_cache()
    result = run(chosen, seeds, steps, folder=folder, quick=quick, measure=not no_runs)
    if plot is not None:
        write_plots(result, plot)
    click.echo(json.dumps(result))
    if result["errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
