"""Benchmarks beside peers: a step of RL, and generation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from tools.bench.harness.checkout import of_checkout
from tools.commands.bench.group import command, find_benchmark
from tools.commands.bench.options import (
    json_option,
    names_in,
    progress,
    quick_option,
    report,
    sections_option,
)


def _with_peers(name: str, peers: str, summary: str, *options: Callable[..., Any]) -> None:
    """Add a benchmark that takes turns with peers."""

    @command.command(
        name=name, help=f"{summary}\n\nPeers run in environments of their own, which the first use installs."
    )
    @click.option("--peers", default="", help=f"Comma-separated peers to take turns with: {peers}.")
    @click.option("--steps", default=10, show_default=True, type=click.IntRange(min=1), help="Measured steps.")
    @json_option
    def measure(peers: str, steps: int, as_json: bool, **more: Any) -> None:
        bench, asked, others = find_benchmark(name), names_in(peers), None
        if asked:
            found = of_checkout("peers", "--peers")
            others = partial(found.peer_commands, name, found.find_peers(asked, name))
        with progress() as say:
            result = bench.run(others, steps, say, **more)
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
