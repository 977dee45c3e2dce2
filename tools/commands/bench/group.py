"""The command group `axl bench`: what everybody may measure and, in a checkout, what proves this project's claims."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from mesh.errors import UserError, did_you_mean

# Commands of tests/benches/commands.py, which no wheel has.
OF_THE_CHECKOUT = ("bisect", "episodes", "experts", "policies", "recovery", "retrieval", "simulate", "tiers")
IN_CHECKOUT = (Path(__file__).parents[3] / "tests" / "benches" / "commands.py").is_file()
_WHERE = "a checkout of this project, installed by `pip install -e .` (docs/benchmarks/index.md)"


def find_benchmark(name: str) -> Any:
    """Return the module that measures the benchmark of this name."""
    home = "tests.benches" if name in OF_THE_CHECKOUT else "tools.bench"
    return import_module(f"{home}.{name}.benchmark")


class BenchmarkGroup(click.Group):
    """A group that suggests the nearest name for an unknown benchmark, and lists those of the checkout apart."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the benchmark of this name."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name in OF_THE_CHECKOUT:
            raise UserError(f"`axl bench {cmd_name}` measures a claim of this project; it is in {_WHERE}")
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
                formatter.write_text(f"{', '.join(OF_THE_CHECKOUT)}: in {_WHERE}.")


@click.group(name="bench", cls=BenchmarkGroup)
def command() -> None:
    """Measure our stack, and peers on the same job, in one run.

    The exit status is 1 if anything that was asked for could not be measured; the rest is reported.
    """
