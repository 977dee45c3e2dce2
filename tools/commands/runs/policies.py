"""`axl rl add`, `axl rl stop` and `axl rl resume`: one policy of a run that trains several, while the others go on."""

from pathlib import Path
from typing import Any

import click

from tools.experiment import LocalPath, text_options

_HELP = {
    "add": """Train one more policy, NAME, in RUN, whose policies are LoRA adapters, while the others go on.

    It joins between two updates, and has the bits that it would have had alone; so have the others. It needs a slot:
    one of a policy that was stopped or is done, or one of policy_slots.""",
    "stop": "Save policy NAME of RUN and stop it, while the others go on; its slot is free then.",
    "resume": "Resume policy NAME of RUN, which was stopped or has failed, from its last checkpoint.",
}
_SET = "An edit of the experiment's config, such as learner.schedule.peak_lr=1e-4. May be repeated."


def _command(kind: Any) -> click.Command:
    @text_options
    def ask(run: Path, name: str, sets: tuple[str, ...] = ()) -> None:
        from axlearn_like.run.directory import RunDirectory
        from mesh.devices import forbid_devices
        from rl.runtime.policies.requests import request_change
        from tools.report.load import find_run

        click.get_current_context().with_resource(forbid_devices("a command beside a run"))
        click.echo(request_change(kind, RunDirectory.attach(find_run(run)), name, sets))

    if kind == "add":
        ask = click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help=_SET)(ask)
    named = click.argument("run", type=LocalPath(path_type=Path))(click.argument("name")(ask))
    return click.command(kind, help=_HELP[kind])(named)


add, stop, resume = (_command(kind) for kind in _HELP)
