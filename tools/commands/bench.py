"""`axl bench NAME`: measure our stack, and peers on the same job, in one run."""

from __future__ import annotations

import json
from typing import Any

import click

from mesh.errors import UserError, did_you_mean


class BenchmarkGroup(click.Group):
    """Names the nearest benchmark when there is none of the name given."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The benchmark of this name."""
        if cmd_name not in self.commands:
            hint = did_you_mean(cmd_name, self.commands)
            raise UserError(f"there is no benchmark {cmd_name!r}{hint}")
        return self.commands[cmd_name]


@click.group(name="bench", cls=BenchmarkGroup)
def command() -> None:
    """Measure our stack, and peers on the same job, in one run."""


@command.command(name="grpo_step")
@click.option("--peers", default="", help="Comma-separated peers to take turns with: tunix,trl.")
@click.option(
    "--steps", default=10, show_default=True, type=click.IntRange(min=1), help="Measured steps."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def grpo_step(peers: str, steps: int, as_json: bool) -> None:
    """CPU seconds of one small GRPO step on this machine.

    Peers run in virtual environments of their own, which the first use installs.
    """
    from rich.console import Console

    from tools.bench import grpo_step as bench
    from tools.bench.peers.environments import find_peers

    asked = find_peers(name.strip() for name in peers.split(",") if name.strip())
    console = Console(stderr=True)
    with console.status("starting") as status:

        def say(line: str) -> None:
            if line.startswith("round"):
                status.update(line)
            else:
                console.print(line, markup=False, highlight=False)

        result = bench.run(asked, steps, say)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print_table(result)
    if not bench.succeeded(result, asked):
        raise SystemExit(1)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tools.bench import grpo_step as bench

    table = Table(title=f"one GRPO step: {bench.describe_job()}; medians of {result['steps']}")
    for name in ("system", "CPU s", "wall s", "sampled tok / CPU s", "first step s", "version"):
        table.add_column(name, justify="left" if name in ("system", "version") else "right")
    for row in bench.rows(result):
        table.add_row(*row)
    console = Console()
    console.print(table)
    if result["ratio_to_best_peer"] is not None:
        ratio, best = result["ratio_to_best_peer"], result["best_peer"]
        console.print(f"ours / {best} (best peer), median over rounds: {ratio:.2f}")
    where = result["machine"]
    console.print(f"{where['cores']} cores, {where['cpu']}, load {where['load']}", highlight=False)
    for name in result["errors"]:
        console.print(f"not measured: {name} (reason above)", style="yellow")
