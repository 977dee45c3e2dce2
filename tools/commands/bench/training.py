"""Benchmarks beside peers (a step of RL, generation), and of weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from tools.commands.bench.group import command
from tools.commands.bench.options import (
    json_option,
    names_in,
    progress,
    quick_option,
    report,
)


def _with_peers(name: str, peers: str, summary: str) -> None:
    """Add a benchmark that takes turns with peers: `tools.bench.NAME.benchmark` runs it."""

    @command.command(
        name=name, help=f"{summary}\n\nPeers run in environments of their own, which the first use installs."
    )
    @click.option("--peers", default="", help=f"Comma-separated peers to take turns with: {peers}.")
    @click.option("--steps", default=10, show_default=True, type=click.IntRange(min=1), help="Measured steps.")
    @json_option
    def measure(peers: str, steps: int, as_json: bool) -> None:
        from tools.bench.harness.environments import find_peers

        bench: Any = import_module(f"tools.bench.{name}.benchmark")
        asked = find_peers(names_in(peers), name)
        with progress() as say:
            result = bench.run(asked, steps, say)
        report(result, as_json, failed=bool(result["errors"]))


_with_peers("grpo_step", "tunix,trl", "CPU seconds of one small GRPO step on this machine.")
_with_peers("rollout", "tunix,transformers", "Sampled tokens per CPU second of the rollout engine on this machine.")


@command.command(name="weights")
@quick_option
@json_option
def weights(quick: bool, as_json: bool) -> None:
    """Speed of push and pull of a gigabyte of weights on this machine, beside a raw stream and a copy."""
    from tools.bench.weights import benchmark as bench

    with progress() as say:
        result = bench.run(say, quick=quick)
    report(result, as_json, failed=False)
