"""`axl launch status|logs|stop|add-worker RUN`: a run that was launched."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from mesh.errors import UserError

if TYPE_CHECKING:
    from tools.launch.control.handle import LaunchedRun


def _run[F: Callable[..., Any]](function: F) -> F:
    """Add the arguments that find a run."""
    namespace = click.option("--namespace", default="default", show_default=True, help="Namespace of RUN on a cluster.")
    queued = click.option("--queued-resource", "where", metavar="PROJECT/ZONE", help="RUN is a queued resource there.")
    return click.argument("run")(namespace(queued(function)))


def _found(run: str, namespace: str, where: str | None) -> LaunchedRun:
    from tools.launch.control.handle import find_run

    return find_run(run, namespace, where)


@click.command("status")
@_run
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line.")
def status(run: str, namespace: str, where: str | None, as_json: bool) -> None:
    """Say what RUN does: its state and progress in one line, then each of its roles.

    Where nothing runs, the line says why: quota, queue, capacity, image, or the crash of the process that failed
    first, with its last words. RUN is the directory of a run on this machine, or the name of one on a cluster.
    """
    import dataclasses

    from tools.launch.control.status import progress_of, verdict

    found = _found(run, namespace, where)
    roles, progress = found.status(), progress_of(found.api, found.name)
    click.echo(f"{found.name}: {verdict(roles)}{'; ' if progress else ''}{progress}", err=as_json)
    for one in roles:
        click.echo(f"  {one.line()}", err=as_json)
    if as_json:
        rows = [dataclasses.asdict(one) for one in roles]
        click.echo(json.dumps({"run": found.name, "verdict": verdict(roles), "progress": progress, "roles": rows}))


@click.command("logs")
@_run
@click.option("--role", help="head, trainer, worker-0, reference, or the name of a Pod.  [default: all]")
@click.option(
    "--lines", default=50, show_default=True, type=click.IntRange(min=1), help="Last lines to show of each log."
)
def logs(run: str, namespace: str, where: str | None, role: str | None, lines: int) -> None:
    """Print the last lines of what RUN's processes have printed."""
    found = _found(run, namespace, where).logs(role, lines)
    if not found:
        raise UserError(f"{run} has no process{'' if role is None else f' of {role!r}'}; `axl launch status` lists all")
    for name, text in found.items():
        click.echo(f"==> {name} <==\n{text}")


@click.command("stop")
@_run
def stop(run: str, namespace: str, where: str | None) -> None:
    """End RUN, and remove all that belongs to it but its results, also what a killed submission has left."""
    _found(run, namespace, where).stop(click.echo)


@click.command("add-worker")
@_run
@click.option("--count", default=1, show_default=True, type=click.IntRange(min=1), help="Workers to add.")
def add_worker(run: str, namespace: str, where: str | None, count: int) -> None:
    """Add rollout workers to RUN, on machines like those of its workers; results do not depend on them."""
    _found(run, namespace, where).add_workers(count, click.echo)


COMMANDS: dict[str, Any] = {one.name: one for one in (status, logs, stop, add_worker) if one.name is not None}
