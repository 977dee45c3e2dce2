"""`axl runs [DIR]`: list runs and how they stand."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tools.experiment import LocalPath

_UNWRAPPED = 1000  # columns


@click.command("runs")
@click.argument("folder", metavar="[DIR]", default="runs", type=LocalPath(path_type=Path))
def command(folder: Path) -> None:
    """List the runs in DIR (default: runs), those with the latest sign of life first.

    A run is `running` while its process lives, `finished` when all is done, `stopped` if it was asked to or failed, `died
    at step N` if its process is gone without a word (kill -9, a machine that went down), and `silent` if it is locked by
    another machine and logs nothing. All but finished ones go on by the same command.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from axlearn_like.run.progress import one_line
    from tools.report.words import MISSING, duration, plain
    from tools.watch.listing import find_runs, listed
    from tools.watch.standing import STYLES

    found = listed(find_runs(folder))
    console, now = Console(), time.time()
    if not console.is_terminal:
        console.width = _UNWRAPPED
    table = Table("run", "state", "phase", "step", "last", "seen", "size", box=None, pad_edge=False)
    for one in found:
        stands, figure, age = one.standing, one.figure, one.standing.age(now)
        state = Text(stands.words, style=STYLES.get(stands.state, ""))
        last = f"{figure[0]} {plain(figure[1])}" if figure else MISSING
        seen = MISSING if age is None else f"{duration(age)} ago"
        name, phase = one_line(one.path, 200), one_line(stands.phase, 20)
        table.add_row(Text(name), state, Text(phase), stands.progress or MISSING, last, seen, _bytes(one.size()))
    console.print(table if found else f"no runs in {one_line(folder, 200)}", markup=False)


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} TB"
