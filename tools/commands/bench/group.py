"""The command group `axl bench`: what everybody may measure and, in a checkout, what proves this project's claims."""

from importlib import import_module
from typing import Any

import click

from mesh.errors import UserError, did_you_mean
from tools.bench.harness.checkout import IN_CHECKOUT, WHERE, of_checkout

# Commands of tests/benches/commands.py, which no wheel has.
OF_THE_CHECKOUT = ("bisect", "episodes", "experts", "kernels", "policies", "recovery", "retrieval", "simulate", "tiers")


def find_benchmark(name: str) -> Any:
    """Return the module that measures the benchmark of this name."""
    if name in OF_THE_CHECKOUT:
        return of_checkout(f"{name}.benchmark", f"axl bench {name}")
    return import_module(f"tools.bench.{name}.benchmark")


class BenchmarkGroup(click.Group):
    """A group that suggests the nearest name for an unknown benchmark, and lists those of the checkout apart."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the benchmark of this name."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name in OF_THE_CHECKOUT:
            of_checkout("commands", f"axl bench {cmd_name}")
        raise UserError(f"there is no benchmark {cmd_name!r}{did_you_mean(cmd_name, self.commands)}")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and summaries of both kinds."""
        rows = [(name, self.commands[name].get_short_help_str(90)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([row for row in rows if row[0] not in OF_THE_CHECKOUT])
        with formatter.section("Commands of the checkout, which measure what this project says of itself"):
            if IN_CHECKOUT:
                formatter.write_dl([row for row in rows if row[0] in OF_THE_CHECKOUT])
            else:
                formatter.write_text(f"{', '.join(OF_THE_CHECKOUT)}: in {WHERE}.")


@click.group(name="bench", cls=BenchmarkGroup)
def command() -> None:
    """Measure our stack, and peers on the same job, in one run.

    The exit status is 1 if anything that was asked for could not be measured; the rest is reported.
    """
