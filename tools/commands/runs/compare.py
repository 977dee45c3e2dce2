"""`axl compare RUN RUN ...`: runs side by side."""

from __future__ import annotations

from pathlib import Path

import click

from mesh.errors import UserError, did_you_mean, printable
from tools.experiment import AnyPath, LocalPath


@click.command("compare")
@click.argument("runs", metavar="RUN RUN ...", nargs=-1, required=True, type=AnyPath(path_type=Path))
@click.option("--metric", "metrics", multiple=True, metavar="PHASE/NAME", help="A figure to lay side by side, such as "
              "rl/entropy; may be repeated.  [default: reward, pass@1, losses, entropy]")  # fmt: skip
@click.option("--out", type=LocalPath(path_type=Path), help="Write a page with charts here, too.")
def command(runs: tuple[Path, ...], metrics: tuple[str, ...], out: Path | None) -> None:
    """Lay two to ten runs side by side: curves, first, last and best values, and where their configs differ.

    `last` is a mean of the last 20 values. The configs are compared as texts: nothing in them is imported.
    """
    from rich.console import Console

    from mesh.files.written import replace_file
    from tools.report.load import load_run
    from tools.watch.compare import MOST, Compared

    if not 2 <= len(runs) <= MOST:
        raise UserError(f"axl compare got {len(runs)} run{'s' * (len(runs) > 1)}; expected 2 to {MOST}")
    if len({path.resolve() for path in runs}) < len(runs):
        raise UserError("axl compare: the same run twice")
    compared = Compared([load_run(path) for path in runs])
    names, console = compared.figures(metrics), Console()
    for name in set(metrics).difference(names):
        raise UserError(f"--metric {name}: no run has it; expected PHASE/NAME{did_you_mean(name, compared.known())}")
    for sheet in compared.sheets(names):
        console.print(sheet.terminal(100) if sheet.rows else "", "")
    if out is not None:
        try:
            replace_file(out, compared.page(names))
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from error
        click.echo(printable(f"page: {out}"))
