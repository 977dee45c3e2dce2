"""`axl rl add`, `axl rl stop` and `axl rl resume`: one policy of a run that trains several, while the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mesh.errors import UserError
from tools.experiment import LocalPath, text_options

if TYPE_CHECKING:
    from axlearn_like.run.directory import RunDirectory


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments of all three."""
    named = click.argument("run", type=LocalPath(path_type=Path))(click.argument("name")(function))
    return text_options(named)


@click.command("add")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="PATH=VALUE",
    help="An edit of the experiment's config, such as learner.schedule.peak_lr=1e-4. May be repeated.",
)
@_named
def add(run: Path, name: str, sets: tuple[str, ...]) -> None:
    """Train one more policy, NAME, in RUN, whose policies are LoRA adapters, while the others go on.

    It joins between two updates, and has the bits that it would have had alone; so have the others. It needs a slot:
    one of a policy that was stopped or is done, or one of policy_slots.
    """
    from rl.runtime.policies.requests import add_policy

    edits: dict[str, str] = {}
    for text in sets:
        path, equals, value = (part.strip() for part in text.partition("="))
        if not path or not equals or path in edits:
            raise UserError(f"--set {text!r}: expected PATH=VALUE, and each path once")
        edits[path] = value
    click.echo(add_policy(_run(run), name, edits))


@click.command("stop")
@_named
def stop(run: Path, name: str) -> None:
    """Save policy NAME of RUN and stop it, while the others go on; its slot is free then."""
    from rl.runtime.policies.requests import stop_policy

    click.echo(stop_policy(_run(run), name))


@click.command("resume")
@_named
def resume(run: Path, name: str) -> None:
    """Resume policy NAME of RUN, which was stopped or has failed, from its last checkpoint, while the others go on."""
    from rl.runtime.policies.requests import resume_policy

    click.echo(resume_policy(_run(run), name))


def _run(path: Path) -> RunDirectory:
    """Return the run's directory (UserError: it is none). Its processes have the devices, so this one opens none."""
    from axlearn_like.run.directory import RunDirectory
    from mesh.devices import forbid_devices
    from tools.report.load import find_run

    click.get_current_context().with_resource(forbid_devices("a command beside a run"))
    return RunDirectory.attach(find_run(path))
