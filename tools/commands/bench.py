"""`axl bench NAME`: measure our stack, and peers on the same job, in one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from mesh.errors import UserError, did_you_mean
from tools.bench.rollout.sections import SECTIONS
from tools.bench.weights.sections import SECTIONS as WEIGHTS_SECTIONS


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
    """Measure our stack, and peers on the same job, in one run."""


PEERS_HELP = "Comma-separated peers to take turns with: "
JSON_HELP = "Print one JSON object as the last line."
SECTIONS_HELP = f"Comma-separated parts to measure, of peers, {', '.join(SECTIONS)}; default: all but peers."
WEIGHTS_SECTIONS_HELP = f"Comma-separated parts to measure, of {', '.join(WEIGHTS_SECTIONS)}; default: all."
_WORDS = ("system", "role", "version", "way", "figure")  # columns of text


@command.command(name="grpo_step")
@click.option("--peers", default="", help=PEERS_HELP + "tunix,trl.")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(min=1), help="Measured steps.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def grpo_step(peers: str, steps: int, as_json: bool) -> None:
    """CPU seconds of one small GRPO step on this machine.

    Peers run in virtual environments of their own, which the first use installs.
    """
    from tools.bench.grpo import benchmark as bench

    _run(bench, peers, steps, as_json, _print_grpo_step)


@command.command(name="rollout")
@click.option("--peers", default="", help=PEERS_HELP + "tunix,transformers.")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1), help="Measured rounds.")
@click.option("--sections", default="", help=SECTIONS_HELP)
@click.option("--quick", is_flag=True, help="Tiny jobs: shows that all runs, measures nothing.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def rollout(peers: str, rounds: int, sections: str, quick: bool, as_json: bool) -> None:
    """Sampled tokens per CPU second of the rollout engine on this machine, and further measurements of the engine.

    The comparison runs when peers are given, or as `--sections peers` with ours alone. Peers run in virtual
    environments of their own, which the first use installs.
    """
    from tools.bench.rollout import benchmark as bench

    chosen = bench.find_sections(_names(sections), peers=bool(_names(peers)))
    _run(bench, peers, rounds, as_json, _print_rollout, sections=chosen, quick=quick)


@command.command(name="recovery")
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=1), help="Of each role.")
@click.option("--roles", default="", help="Comma-separated roles to kill; default: all, and the driver.")
@click.option("--seed", default=0, show_default=True, help="Of the order of the kills and of the moments.")
@click.option("--minutes", type=float, help="Begin no further kill after so long; default: make them all.")
@click.option("--keep", type=click.Path(path_type=Path), help="A new directory to keep the runs in.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def recovery(kills: int, roles: str, seed: int, minutes: float | None, keep: Path | None, as_json: bool) -> None:
    """Seconds from SIGKILL of a role to the next update, and whether the run's result is the same to the bit."""
    from rich.console import Console

    from mesh.compilation import enable_compilation_cache
    from tools.bench.recovery import benchmark as bench

    console = Console(stderr=True)
    enable_compilation_cache()
    result = bench.run(
        kills,
        bench.find_roles(_names(roles)),
        lambda line: console.print(line, markup=False, highlight=False),
        seed=seed,
        minutes=minutes,
        keep=keep,
    )
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print_recovery(result)
    if not bench.succeeded(result):
        raise SystemExit(1)


@command.command(name="weights")
@click.option("--sections", default="", help=WEIGHTS_SECTIONS_HELP)
@click.option("--quick", is_flag=True, help="Tiny jobs: shows that all runs, measures nothing.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def weights(sections: str, quick: bool, as_json: bool) -> None:
    """Speed of push and pull of weights on this machine, pause of a swap, deltas, resharding, fan-out."""
    from tools.bench.weights import benchmark as bench

    _run(bench, "", 0, as_json, _print_weights, sections=bench.find_sections(_names(sections)), quick=quick)


@command.command(name="input")
@click.option("--documents", default=5000, show_default=True, type=click.IntRange(min=1), help="To make and pack.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def input_(documents: int, as_json: bool) -> None:
    """Tokens of training input per CPU second: tokenising, and packing in each way."""
    from tools.bench.input import benchmark as bench

    result = bench.run(documents)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print_input(result)


@command.command(name="train_step")
@click.option("--peers", default="", help=PEERS_HELP + "maxtext.")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(min=1), help="Measured steps.")
@click.option("--quick", is_flag=True, help="Tiny jobs: shows that all runs, measures nothing.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def train_step(peers: str, steps: int, quick: bool, as_json: bool) -> None:
    """CPU seconds of a supervised train step beside plain JAX, of its dispatch, and from start to first step.

    Peers run in virtual environments of their own, which the first use installs.
    """
    from tools.bench.train_step import benchmark as bench

    _run(bench, peers, steps, as_json, _print_train_step, quick=quick)


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def _run(
    bench: Any, peers: str, rounds: int, as_json: bool, show: Callable[[dict[str, Any]], None], **options: Any
) -> None:
    """Run a benchmark's module and show its result; exit with 1 if it does not have everything requested.

    `options` are passed to the module's `run`.
    """
    from rich.console import Console

    from tools.bench.harness.environments import find_peers

    asked = find_peers(_names(peers), bench.BENCHMARK)
    console = Console(stderr=True)
    with console.status("starting") as status:

        def say(line: str) -> None:
            if line.startswith("round"):
                status.update(line)
            else:
                console.print(line, markup=False, highlight=False)

        result = bench.run(asked, rounds, say, **options)
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)
    if not bench.succeeded(result, asked):
        raise SystemExit(1)


def _print_grpo_step(result: dict[str, Any]) -> None:
    from tools.bench.grpo import benchmark as bench

    _print_table(
        f"one GRPO step: {bench.describe_job()}; medians of {result['steps']}",
        ("system", "CPU s", "wall s", "sampled tok / CPU s", "first step s", "version"),
        bench.rows(result),
    )
    if result["ratio_to_best_peer"] is not None:
        ratio, best = result["ratio_to_best_peer"], result["best_peer"]
        click.echo(f"ours / {best} (best peer), median over rounds: {ratio:.2f}")
    _print_circumstances(result)


def _print_rollout(result: dict[str, Any]) -> None:
    from tools.bench.rollout.tables import tables

    for table in tables(result):
        _print_table(*table)
    _print_circumstances(result)


def _print_recovery(result: dict[str, Any]) -> None:
    from tools.bench.recovery import benchmark as bench

    figures = ("next update s", "back s", "longest gap s", "back CPU s")
    columns = ("role", "kills", *(column for figure in figures for column in (figure, "worst")))
    _print_table(f"seconds after kill -9, medians; {result['updates']} updates", columns, bench.rows(result))
    names = ("lost_steps", "redone_steps", "regenerated_tokens", "double_consumed", "bit_identical")
    click.echo(", ".join(f"{name}: {result[name]}" for name in names))
    _print_circumstances(result | {"errors": ()})


def _print_weights(result: dict[str, Any]) -> None:
    from tools.bench.weights import benchmark as bench

    _print_table("weights through the parameter server", ("figure", "value"), bench.rows(result))
    _print_circumstances(result)


def _print_input(result: dict[str, Any]) -> None:
    from tools.bench.input import benchmark as bench

    columns = ("way", "tokens / CPU s", "CPU ms / batch", "packing")
    fields = ("tokens_per_cpu_s", "cpu_ms_per_batch", "packing")
    rows = [(name, *(f"{result[name][field]:,}" for field in fields)) for name in bench.CASES]
    shape = f"{result['batch_size']} x {result['seq_len']:,}"
    _print_table(f"input, {result['documents']:,} documents, batches of {shape}", columns, rows)
    click.echo(f"tokenised: {result['tokenise_tokens_per_cpu_s']:,} bytes / CPU s")
    _print_circumstances(result)


def _print_train_step(result: dict[str, Any]) -> None:
    from tools.bench.train_step import benchmark as bench

    columns = ("system", "float32 CPU s", "wall s", "ours / it", "bfloat16 CPU s", "wall s", "ours / it", "start CPU s")
    title = f"one step: {bench.describe_job(quick=result['quick'])}; medians of {result['steps']}"
    _print_table(title, columns, bench.rows(result))
    for layers, figures in result["dispatch"].items():
        click.echo(f"dispatch at {layers} layers: {figures['lowest']} us, of which JAX itself {figures['nothing']}")
    parts = result["cold_start_parts"] or {}
    click.echo("our start: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items()))
    _print_circumstances(result)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _print_circumstances(result: dict[str, Any]) -> None:
    where = result["machine"]
    click.echo(f"{where['cores']} cores, {where['cpu']}, load {where['load']}")
    for name in result["errors"]:
        click.secho(f"not measured: {name} (reason above)", fg="yellow")
