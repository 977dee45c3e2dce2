"""Benchmarks beside peers (a supervised step, a step of RL, generation), of weights and of recovery."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from tools.commands.bench.group import command
from tools.commands.bench.options import (
    json_option,
    names_in,
    progress,
    quick_option,
    report,
    sections_option,
)
from tools.experiment import LocalPath


def _with_peers(name: str, peers: str, summary: str, *options: Callable[..., Any]) -> None:
    """Add a benchmark that takes turns with peers: `tools.bench.NAME.benchmark` runs it."""

    @command.command(
        name=name, help=f"{summary}\n\nPeers run in environments of their own, which the first use installs."
    )
    @click.option("--peers", default="", help=f"Comma-separated peers to take turns with: {peers}.")
    @click.option("--steps", default=10, show_default=True, type=click.IntRange(min=1), help="Measured steps.")
    @json_option
    def measure(peers: str, steps: int, as_json: bool, **more: Any) -> None:
        from tools.bench.harness.environments import find_peers

        bench: Any = import_module(f"tools.bench.{name}.benchmark")
        asked = find_peers(names_in(peers), name)
        with progress() as say:
            result = bench.run(asked, steps, say, **more)
        report(result, as_json, failed=bool(result["errors"]))

    for option in options:
        option(measure)


_with_peers("grpo_step", "tunix,trl", "CPU seconds of one small GRPO step on this machine.", sections_option)
_with_peers(
    "rollout",
    "tunix,transformers",
    "Sampled tokens per CPU second of the rollout engine on this machine.",
    click.option("--sections", default="", metavar="NAMES", help="Measure coupled instead: an evaluation some updates "
                 "later, drafted from the earlier one (it trains the demo first: minutes)."),
    quick_option,
)  # fmt: skip


@command.command(name="weights")
@sections_option
@quick_option
@json_option
def weights(sections: list[str], quick: bool, as_json: bool) -> None:
    """Speed of push and pull of a gigabyte of weights on this machine, beside a raw stream and a copy."""
    from tools.bench.weights import benchmark as bench

    with progress() as say:
        result = bench.run(sections, say, quick=quick)
    report(result, as_json, failed=False)


@command.command(name="recovery")
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=1), help="Kills of each role.")
@click.option("--roles", default="", help="Comma-separated roles to kill; default: all, and the driver.")
@click.option("--seed", default=0, show_default=True, help="Seed of the order of the kills and of their moments.")
@click.option("--minutes", type=float, help="Start no further kill after this time; default: make them all.")
@click.option("--every", default=0.0, help="Seconds from one kill to the next, at least; 60: one preemption a minute.")
@click.option("--spares", default=1, show_default=True, type=click.IntRange(0, 1), help="Warm processes that take over "
              "from the trainer, and from workers.")  # fmt: skip
@click.option("--keep", type=LocalPath(path_type=Path), help="A new directory to keep the runs in.")
@json_option
def recovery(kills: int, roles: str, keep: Path | None, as_json: bool, **how: Any) -> None:
    """Seconds from SIGKILL of a role to the next update, and whether the run's result is the same to the bit."""
    from mesh.programs.compilation import enable_compilation_cache
    from tools.bench.recovery import benchmark as bench

    chosen = bench.find_roles(names_in(roles))
    enable_compilation_cache()
    with progress() as say:
        result = bench.run(bench.Kills(kills, chosen, **how), say, keep=keep)
    report(result, as_json, failed=not bench.succeeded(result))
