"""`axl watch [RUN]`: follow a run in the terminal, or serve its report as a page that renews itself."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from mesh.errors import UserError, did_you_mean, printable
from mesh.files.bucket import bucket_url
from tools.experiment import AnyPath


@click.command("watch")
@click.argument("run", metavar="[RUN]", required=False, type=AnyPath(path_type=Path))
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option("--serve", is_flag=True, help="Serve the report on 127.0.0.1 as a page that renews itself.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port of --serve.  [default: any free one]")
def command(run: Path | None, once: bool, serve: bool, port: int | None) -> None:
    """Follow RUN, also gs://...: phases, figures, alarms and the newest answers, from the files of its directory alone.

    Without RUN: the newest active run in runs/, or else the newest one. Without a terminal a line is printed every few
    seconds. It ends with the run; Ctrl-C ends the watching, and nothing of the run.
    """
    if port is not None and not serve:
        raise UserError("--port belongs to --serve")
    if once and serve:
        raise UserError("--once prints a frame, --serve serves a page; expected one of them")
    from rich.console import Console

    from axlearn_like.run.mirror import fetch_logs
    from tools.report.load import Run, find_run, load_run
    from tools.watch.frame import frame
    from tools.watch.live import watch

    url = None if run is None else bucket_url(run)
    refresh: Callable[[], object] = (lambda: None) if url is None else partial(fetch_logs, url)
    folder = _newest() if run is None else run.expanduser() if url is None else fetch_logs(url)
    if not folder.exists() and not once and not serve and run is not None:
        hint = did_you_mean(
            folder.name, [one.name for one in folder.parent.iterdir()] if folder.parent.is_dir() else []
        )
        click.echo(printable(f"{folder}: no such directory yet; waiting for it{hint}"), err=True)
    elif not folder.is_dir() or any(folder.iterdir()):
        find_run(folder)  # refuses what is no run
    if once:
        return Console().print(frame(load_run(folder) if any(folder.iterdir()) else Run(folder)))
    if serve:
        return _serve(folder, port or 0, refresh)
    watch(folder, Console(), refresh)


def _newest() -> Path:
    from tools.watch.listing import find_runs, listed

    if not Path("runs").is_dir() or not (found := listed(find_runs("runs"))):
        raise UserError("no runs in runs/; expected a run directory: axl watch RUN")
    return next((path for path, stands in found if stands.state == "running"), found[0][0])


def _serve(folder: Path, port: int, refresh: Callable[[], object]) -> None:
    from tools.watch.serve import ReportServer

    with ReportServer(folder, port, refresh) as server:
        click.echo(f"serving the report of {printable(str(folder))} at {server.url}\nCtrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
