"""The command group `axl bench`."""

from __future__ import annotations

import click

from mesh.errors import UserError, did_you_mean


class BenchmarkGroup(click.Group):
    """A group that suggests the nearest name for an unknown benchmark."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the benchmark of this name."""
        if cmd_name not in self.commands:
            hint = did_you_mean(cmd_name, self.commands)
            raise UserError(f"there is no benchmark {cmd_name!r}{hint}")
        return self.commands[cmd_name]


@click.group(name="bench", cls=BenchmarkGroup)
def command() -> None:
    """Measure our stack, and peers on the same job, in one run.

    The exit status is 1 if anything that was asked for could not be measured; the rest is reported.
    """
