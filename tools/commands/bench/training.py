"""Benchmarks of training: a supervised step, a step of RL, weights, recovery."""

from __future__ import annotations

from pathlib import Path

import click

from tools.commands.bench.group import command
from tools.commands.bench.options import (
    json_option,
    names_in,
    peers_option,
    progress,
    quick_option,
    report,
    steps_option,
)
from tools.experiment import LocalPath


@command.command(name="train_step")
@peers_option("maxtext")
@steps_option
@quick_option
@json_option
def train_step(peers: str, steps: int, quick: bool, as_json: bool) -> None:
    """CPU seconds of a supervised train step beside plain JAX, and from start to first step.

    Peers run in virtual environments of their own, which the first use installs.
    """
    from tools.bench.harness.environments import find_peers
    from tools.bench.train_step import benchmark as bench

    asked = find_peers(names_in(peers), bench.BENCHMARK)
    with progress() as say:
        result = bench.run(asked, steps, say, quick=quick)
    report(result, as_json, failed=bool(result["errors"]))


@command.command(name="grpo_step")
@peers_option("tunix,trl")
@steps_option
@json_option
def grpo_step(peers: str, steps: int, as_json: bool) -> None:
    """CPU seconds of one small GRPO step on this machine.

    Peers run in virtual environments of their own, which the first use installs.
    """
    from tools.bench.grpo import benchmark as bench
    from tools.bench.harness.environments import find_peers

    asked = find_peers(names_in(peers), bench.BENCHMARK)
    with progress() as say:
        result = bench.run(asked, steps, say)
    report(result, as_json, failed=bool(result["errors"]))


@command.command(name="weights")
@quick_option
@json_option
def weights(quick: bool, as_json: bool) -> None:
    """Speed of push and pull of a gigabyte of weights on this machine, beside a raw stream and a copy."""
    from tools.bench.weights import benchmark as bench

    with progress() as say:
        result = bench.run(say, quick=quick)
    report(result, as_json, failed=False)


@command.command(name="recovery")
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=1), help="Kills of each role.")
@click.option("--roles", default="", help="Comma-separated roles to kill; default: all, and the driver.")
@click.option("--seed", default=0, show_default=True, help="Seed of the order of the kills and of their moments.")
@click.option("--minutes", type=float, help="Start no further kill after this time; default: make them all.")
@click.option("--keep", type=LocalPath(path_type=Path), help="A new directory to keep the runs in.")
@json_option
def recovery(kills: int, roles: str, seed: int, minutes: float | None, keep: Path | None, as_json: bool) -> None:
    """Seconds from SIGKILL of a role to the next update, and whether the run's result is the same to the bit."""
    from mesh.programs.compilation import enable_compilation_cache
    from tools.bench.recovery import benchmark as bench

    chosen = bench.find_roles(names_in(roles))
    enable_compilation_cache()
    with progress() as say:
        result = bench.run(kills, chosen, say, seed=seed, minutes=minutes, keep=keep)
    report(result, as_json, failed=not bench.succeeded(result))
