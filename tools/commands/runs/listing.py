"""`axl runs [DIR]`: list runs and how they stand."""

import time
from pathlib import Path

import click

from tools.experiment import AnyPath

_UNWRAPPED = 1000  # columns
_WIDE = 100  # characters of a cell


@click.command("runs")
@click.argument("folder", metavar="[DIR]", default="runs", type=AnyPath(path_type=Path))
def command(folder: Path) -> None:
    """List the runs in DIR (default: runs; also gs://...), those with the latest sign of life first.

    A run is `running` while its process lives, `finished` when all is done, `stopped` if it was asked to or failed,
    `died at step N` if its process is gone without a word (kill -9, a machine that went down), and `silent` if another
    machine has locked it and logs nothing. All but finished ones go on by the same command.
    """
    from rich.console import Console

    from tools.watch.listing import find_runs, listed, sheet

    console = Console()
    if not console.is_terminal:
        console.width = _UNWRAPPED
    console.print(sheet(listed(find_runs(folder)), time.time()).terminal(_WIDE))
