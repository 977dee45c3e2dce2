"""``axl report RUN``: rebuilds a run's ``report.html`` and prints its tables."""

from __future__ import annotations

import click


@click.command("report")
@click.argument("run", metavar="RUN", type=click.Path(path_type=str))
@click.option("--open", "open_page", is_flag=True, help="Show the page in the browser.")
def command(run: str, open_page: bool) -> None:
    """Rebuild report.html of the run directory RUN and print its tables.

    Also works while the run is still under way: parts that are not there yet are left out.
    """
    from tools.report import load_run, write_report
    from tools.report.table import print_tables

    loaded = load_run(run)
    page = write_report(loaded)
    print_tables(loaded)
    click.echo(f"report: {page}")
    if open_page:
        click.launch(str(page.resolve()))
