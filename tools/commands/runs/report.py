"""``axl report RUN``: rebuild a run's ``report.html`` and print its tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from mesh.errors import UserError, printable
from tools.experiment import AnyPath, LocalPath

if TYPE_CHECKING:
    from tools.report import Run

_FILE = LocalPath(path_type=Path, dir_okay=False)


@click.command("report")
@click.argument("run", metavar="RUN", type=AnyPath(path_type=Path))
@click.option("--open", "open_page", is_flag=True, help="Show the page in the browser.")
@click.option("--check", is_flag=True, help="Print what must hold of an RL run; exit status 1 if something is broken.")
@click.option("--output", type=_FILE, help="Write the page here. Default: RUN/report.html.")
@click.option("--episodes", type=_FILE, help="Write recorded episodes here as JSONL, no report.")
@click.option("--form", type=click.Choice(["openai", "atif"]), default="openai", help="Form of --episodes.")
def command(
    run: Path, open_page: bool, check: bool, output: Path | None, episodes: Path | None, form: Literal["openai", "atif"]
) -> None:
    """Rebuild report.html of the run directory RUN and print its tables.

    Also works while the run is still under way: parts that are not there yet are left out. Tables and checks are
    printed even where the page cannot be written.

    With --episodes, RUN may be a folder of axl eval --out, too. Forms are messages of OpenAI's chats, and ATIF, the
    trajectories of Harbor.
    """
    if episodes is not None:
        from rl.evaluation.traces import write_episodes

        click.echo(printable(f"{write_episodes(run, episodes, form)} episodes: {episodes}"))
        return
    from tools.report import load_run, write_report
    from tools.report.table import print_tables

    loaded = load_run(run)
    print_tables(loaded)
    broken = check and _print_invariants(loaded)
    page = write_report(loaded, output)
    click.echo(printable(f"report: {page}"))
    if open_page:
        click.launch(str(page.resolve()))
    if broken:
        raise SystemExit(1)


def _print_invariants(loaded: Run) -> bool:
    """Print the invariants; return True if one is broken."""
    from rich.console import Console

    from tools.report.invariants import findings, sheet

    found = findings(loaded)
    if not found:
        raise UserError(f"{loaded.path} holds no updates of reinforcement learning to check")
    Console().print(sheet(found).terminal())
    return any(finding.broken for finding in found)
