"""`axl compare RUN RUN ...`: runs side by side."""

from pathlib import Path
from typing import Any

import click

from mesh.errors import UserError, did_you_mean, printable
from tools.experiment import AnyPath, LocalPath


@click.command("compare")
@click.argument("runs", metavar="RUN RUN ...", nargs=-1, required=True, type=AnyPath(path_type=Path))
@click.option("--metric", "metrics", multiple=True, metavar="PHASE/NAME", help="A figure to lay side by side, such as "
              "rl/entropy; may be repeated.  [default: reward, pass@1, losses, entropy]")  # fmt: skip
@click.option("--out", type=LocalPath(path_type=Path, dir_okay=False), help="Write a page with charts here, too.")
def command(runs: tuple[Path, ...], metrics: tuple[str, ...], out: Path | None) -> None:
    """Lay two to ten runs side by side: curves, first, last and best values, and where their configs differ.

    `last` is a mean of the last 20 values. Last evaluations are paired with the first run's, over problems and, of one
    seed, over noise; so are two folders of `axl eval`. The configs are compared as texts: nothing in them is imported.
    """
    from rich.console import Console

    from mesh.files.written import replace_file
    from rl.evaluation.paired import compare_evaluated
    from tools.report.load import load_run
    from tools.watch.compare import MOST, Compared

    if not 2 <= len(runs) <= MOST:
        raise UserError(f"axl compare got {len(runs)} run{'s' * (len(runs) > 1)}; expected 2 to {MOST}")
    if len({path.resolve() for path in runs}) < len(runs):
        raise UserError("axl compare: the same run twice")
    pairs = [(other, found) for other in runs[1:] if (found := compare_evaluated(runs[0], other))]
    if pairs and pairs[0][1]["steps"] is None:  # folders of `axl eval`
        return _print_pairs(runs[0], pairs)
    compared = Compared([load_run(path) for path in runs])
    names, console = compared.figures(metrics), Console()
    for name in set(metrics).difference(names):
        raise UserError(f"--metric {name}: no run has it; expected PHASE/NAME{did_you_mean(name, compared.known())}")
    for sheet in compared.sheets(names):
        console.print(sheet.terminal(100) if sheet.rows else "", "")
    _print_pairs(runs[0], pairs)
    if out is not None:
        try:
            replace_file(out, compared.page(names))
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from error
        click.echo(printable(f"page: {out}"))


def _print_pairs(first: Path, pairs: list[tuple[Path, dict[str, Any]]]) -> None:
    """Print the differences of evaluations to those of the first run."""
    from rl.evaluation.paired import paired_text

    for other, found in pairs:
        noise = "the same noise" if found["same_noise"] else "other noise: give both runs one seed"
        steps = "" if found["steps"] is None else f", versions {found['steps'][0]} and {found['steps'][1]}"
        click.echo(printable(f"{other} - {first}{steps}: {paired_text(found)} ({noise})"))
