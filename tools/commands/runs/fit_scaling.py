"""`axl fit-scaling RUN ...`: the sigmoid of ScaleRL through the rewards of finished or unfinished runs."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import click

from axlearn_like.run.metrics import read_rows
from mesh.errors import UserError, did_you_mean
from tools.experiment import LocalPath

if TYPE_CHECKING:
    from rl.evaluation.learning_curve import Curve

_COMPUTE = {"updates": None, "tokens": "gen_tokens", "seconds": "step_seconds"}


@click.command("fit-scaling")
@click.argument("runs", nargs=-1, required=True, type=LocalPath(path_type=Path, exists=True, file_okay=False))
@click.option("--metric", default="reward", show_default=True, help="Metric of the updates, such as reward/FAMILY.")
@click.option("--compute", type=click.Choice(list(_COMPUTE)), default="updates", show_default=True)
@click.option("--ceiling", default=1.0, show_default=True, help="The largest value that the metric can have.")
@click.option("--draws", default=200, show_default=True, type=click.IntRange(min=20), help="Bootstrap samples.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def command(runs: tuple[Path, ...], metric: str, compute: str, ceiling: float, draws: int, as_json: bool) -> None:
    """Fit the sigmoid of ScaleRL (arXiv 2510.13786) to the runs in the directories RUNS, which are seeds of one recipe.

    Prints the asymptote, where half of the gain is made and how steeply, each with a 95 % interval by bootstrap over
    runs and stretches of them; how far a fit to the first half is from the second; the value after twice the compute.
    Curves that do not rise, or have not bent, are refused: they say nothing about an asymptote.
    """
    from rl.evaluation.learning_curve import fit_curves

    figures = fit_curves([read_curve(path, metric, compute) for path in runs], ceiling=ceiling, draws=draws).figures()
    if as_json:
        click.echo(json.dumps({"metric": metric, "compute": compute, **figures}))
        return
    for name in ("start", "asymptote", "exponent", "midpoint"):
        low, high = figures[f"{name}_ci"]
        click.echo(f"{name:12} {figures[name]:<10.4g} 95 %: {low:.4g} to {high:.4g}")
    value, low, high = figures["twice_the_compute"]
    click.echo(f"after twice the {compute}: {value:.3f} (95 %: {low:.3f} to {high:.3f})")
    ahead = figures["ahead_rmse"]
    known = "cannot be fitted alone" if ahead is None else f"leaves {ahead:.3f} to the second"
    click.echo(f"error of a point {figures['rmse']:.3f}; the first half {known}")


def read_curve(path: Path, metric: str, compute: str) -> Curve:
    """Return the curve of a run: the compute spent before each batch, and the metric of the batch.

    Raises:
        UserError: the run has no such metric, or no updates.
    """
    from rl.evaluation.learning_curve import Curve

    rows = [row for row in read_rows(path / "metrics.jsonl") if row["phase"] == "rl"]
    if not rows:
        raise UserError(f"{path} has no updates of RL in metrics.jsonl; expected the directory of a run of axl rl")
    named = [row for row in rows if row.get(metric) is not None]
    if not named:
        raise UserError(f"{path}: no update has a metric {metric!r}{did_you_mean(metric, rows[-1])}")
    key = _COMPUTE[compute]
    spent = [0.0, *accumulate(1.0 if key is None else float(row[key]) for row in rows)]
    pairs = [(before, row[metric]) for before, row in zip(spent, rows, strict=False) if row.get(metric) is not None]
    return Curve(*map(list, zip(*pairs, strict=True)))
