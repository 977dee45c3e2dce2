"""Benchmarks of reinforcement learning: updates, learning, weights, recovery, launch."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mesh.errors import UserError
from tools.bench.weights.sections import SECTIONS as WEIGHTS_SECTIONS
from tools.commands.bench.group import command
from tools.commands.bench.options import (
    json_option,
    names_in,
    peers_option,
    progress,
    quick_option,
    report,
    sections_option,
    steps_option,
)
from tools.experiment import LocalPath

RL_UPDATE_SECTIONS = ("packing", "shared_prefix")


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


@command.command(name="grpo_reward")
@peers_option("tunix,trl")
@click.option("--steps", default=60, show_default=True, type=click.IntRange(min=5), help="Updates of each run.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1), help="Runs of each system.")
@json_option
def grpo_reward(peers: str, steps: int, seeds: int, as_json: bool) -> None:
    """Steps to the rewards that peers reach on the small GRPO job, from the same initial weights; nothing is timed."""
    from tools.bench.grpo import reward as bench
    from tools.bench.harness.environments import find_peers

    asked = find_peers(names_in(peers), "grpo_step")
    with progress() as say:
        result = bench.run(asked, steps, seeds, say)
    report(result, as_json, failed=bool(result["errors"]))


@command.command(name="rl_update")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Measured updates of each.")
@sections_option(RL_UPDATE_SECTIONS, "shared_prefix")
@json_option
def rl_update(rounds: int, sections: str, as_json: bool) -> None:
    """Tokens that an RL update wastes by packed rows and by padded ones, and the CPU seconds of each.

    Section `shared_prefix`: FLOPs, temporary bytes and CPU seconds of a group that shares its prompt, beside separate
    rows, where the prompt is as long as an answer, 4 and 16 times as long; and of a group of forked answers.
    """
    from tools.bench.harness.sections import find_sections
    from tools.bench.rl_update import benchmark as bench

    chosen = find_sections("rl_update", names_in(sections), RL_UPDATE_SECTIONS, ("packing",))
    report(bench.run_sections(rounds, chosen), as_json, failed=False)


@command.command(name="learning")
@click.option("--only", default="", help="Comma-separated runs or sections; default: all.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1), help="Seeds of each run.")
@click.option("--steps", default=40, show_default=True, type=click.IntRange(min=1), help="Batches of a run.")
@click.option("--folder", type=LocalPath(path_type=Path, file_okay=False), default=Path("runs/bench_learning"),
              show_default=True, help="Where the runs live; the same command goes on there.")  # fmt: skip
@click.option("--no-runs", is_flag=True, help="Make no runs: report those that have ended.")
@click.option("--plot", type=LocalPath(path_type=Path, file_okay=False), help="A folder for plots (SVG).")
@quick_option
@json_option
def learning(
    only: str, seeds: int, steps: int, folder: Path, no_runs: bool, plot: Path | None, quick: bool, as_json: bool
) -> None:
    """Rewards of every objective over updates, from one supervised start; staleness, epochs, KL and cut batches.

    Every run is a run directory: killed and started again, the benchmark goes on where it was.
    """
    from mesh.programs.compilation import enable_compilation_cache
    from tools.bench.learning import benchmark as bench

    chosen = bench.find_runs(names_in(only))
    enable_compilation_cache()
    with progress() as say:
        result = bench.run(chosen, seeds, steps, say, folder=folder, quick=quick, measure=not no_runs)
    if plot is not None:
        from tools.bench.learning.plot import write_plots

        write_plots(result, plot)
    report(result, as_json, failed=bool(result["errors"]))


@command.command(name="weights")
@sections_option(WEIGHTS_SECTIONS, "transports")
@quick_option
@json_option
def weights(sections: str, quick: bool, as_json: bool) -> None:
    """Speed of push and pull of weights on this machine, pause of a swap, deltas, resharding, fan-out."""
    from tools.bench.harness.sections import find_sections
    from tools.bench.weights import benchmark as bench

    chosen = find_sections(bench.BENCHMARK, names_in(sections), WEIGHTS_SECTIONS, bench.DEFAULT)
    with progress() as say:
        result = bench.run(say, sections=chosen, quick=quick)
    report(result, as_json, failed=bool(result["errors"]))


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


@command.command(name="launch")
@quick_option
@json_option
def launch(quick: bool, as_json: bool) -> None:
    """Seconds of a plan, from submission to the first update, and from a lost machine to its next rollout.

    The manifests are carried out on this machine, twice: cold, and with programs that are compiled. `bit_identical`:
    both runs, which lose a worker's machine, end in the weights of one process that lost nothing.
    """
    from tools.bench.launch import benchmark as bench

    with progress() as say:
        figures = bench.measure(say, quick=quick)
    for name, value in figures.items():
        click.echo(f"{name:32} {value}")
    if as_json:
        click.echo(json.dumps(figures))
    if not figures.get("bit_identical", True):
        raise UserError("a run that lost a machine ended in other weights")
