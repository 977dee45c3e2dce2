"""Cost of our trainer beside a plain-JAX script and MaxText on one small decoder.

    python -m tests.studies.train_step.benchmark [--peers maxtext] [--steps 10] [--quick]

Steps are interleaved in one run; the start of the program is measured separately.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tests.benches.peers import Peer, find_peers, peer_commands
from tests.peers.train_job import DTYPES
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import OURS, Measured, Say, errors_of, measure, ratio_over_rounds
from tools.bench.harness.processes import Command, our_command
from tools.bench.harness.protocol import TRAIN_FIELDS
from tools.bench.harness.sections import run_sections
from tools.bench.harness.starts import cached_starts

BENCHMARK = "train_step"
EXPERIMENTS = "tests.studies.train_step.ours"
PLAIN, FLAT = "plain_jax", "plain_jax_flat"
SECTIONS = {"steps": 120.0, "warm_starts": 60.0}  # peers come on top
STARTS = 3  # starts with a warm cache; one before fills it
PACKAGES = ("axlearn-like", "jax", "jaxlib", "flax", "optax", "grain", "numpy")


def run(
    peers: Sequence[Peer],
    rounds: int,
    say: Say,
    sections: Sequence[str] = tuple(SECTIONS),
    *,
    quick: bool = False,
) -> dict[str, Any]:
    """Return everything that `--json` prints; failed measurements are listed under `errors`."""
    where = machine()  # measured before our own load
    systems, errors = commands(peers, say, quick=quick)
    # A step with float32 and one with bfloat16 of each system make one round.
    turns = {f"{name} {dtype}": with_dtype(systems[name], dtype) for dtype in DTYPES for name in systems}

    def warm_starts() -> Any:
        one_dtype = {name: with_dtype(command, DTYPES[0]) for name, command in systems.items() if name != FLAT}
        with tempfile.TemporaryDirectory(prefix="axl-bench-") as folder:
            return cached_starts(one_dtype, Path(folder), 1 if quick else STARTS, say)

    measures = {"steps": lambda: measure(turns, rounds, say, TRAIN_FIELDS), "warm_starts": warm_starts}
    found, missing = run_sections({name: measures[name] for name in sections}, say)
    steps, (starts, unstarted) = found.get("steps", {}), found.get("warm_starts", ({}, {}))
    errors |= errors_of(steps) | {f"start of {name}": why for name, why in unstarted.items()}
    result = summarise(steps, starts, rounds) | {"quick": quick, "errors": errors, "missing": missing}
    return result | {"machine": where, **circumstances(PACKAGES)}


def commands(peers: Sequence[Peer], say: Say, *, quick: bool) -> tuple[dict[str, Command], dict[str, str]]:
    """Return each system's command, in the order of turns, and why some peers have none; `{}` is for the dtype."""
    more = ["--quick"] if quick else []
    found, errors = peer_commands(BENCHMARK, peers, say)
    found = {name: Command((*one.argv, *more, "--dtype", "{}"), one.environ) for name, one in found.items()}
    experiment, plain = EXPERIMENTS + (":{}_quick" if quick else ":{}"), "tests.studies.train_step.plain"
    ours = {
        OURS: our_command("tools.cli", "train", "--quiet", experiment),
        PLAIN: our_command(plain, *more, "--dtype", "{}"),
        FLAT: our_command(plain, "--flat", *more, "--dtype", "{}"),
    }
    return {**ours, **found}, errors


def with_dtype(command: Command, dtype: str) -> Command:
    """Return the command of the same system with activations of this dtype."""
    *argv, last = command.argv
    return Command((*argv, last.format(dtype)), command.environ)


def summarise(
    steps: Mapping[str, Measured],
    starts: Mapping[str, Sequence[Mapping[str, Any]]],
    rounds: int,
) -> dict[str, Any]:
    """Return the figures. Those at the top level are of float32; those of bfloat16 are under that name.

    Args:
        steps: by "system dtype".
        starts: ready lines, by system.
        rounds: measured.
    """
    done = {name: result for name, result in steps.items() if result.error is None}
    first, *others = DTYPES
    cold = {name: statistics.median(line["start_cpu_s"] for line in lines) for name, lines in starts.items() if lines}
    return {
        "bench": BENCHMARK,
        **_of_dtype(done, first),
        **{dtype: _of_dtype(done, dtype) for dtype in others},
        "cold_start_cpu_s": cold.get(OURS),
        "cold_start_cpu_s_of": cold,
        "uncached_start_cpu_s": {name: result.ready["start_cpu_s"] for name, result in done.items()},
        "steps": rounds,
        "parameters": {name: result.ready["parameters"] for name, result in done.items()},
        "system_versions": {name.partition(" ")[0]: result.ready["version"] for name, result in done.items()},
        "loss_last": {name: result.steps[-1]["loss"] for name, result in done.items()},
        "cpu_s_by_round": {name: [round(step["cpu_s"], 4) for step in r.steps] for name, r in done.items()},
        "idle_cpu_s": {name: result.median("idle_cpu_s") for name, result in done.items()},
    }


def _of_dtype(done: Mapping[str, Measured], dtype: str) -> dict[str, Any]:
    """Return medians of each system, and of our CPU seconds divided by theirs in the same round."""
    of = {name.partition(" ")[0]: result for name, result in done.items() if name.endswith(f" {dtype}")}
    figures: dict[str, Any] = {}
    for name in (OURS, PLAIN, FLAT, *(name for name in of if name not in (OURS, PLAIN, FLAT))):
        figures[f"{name}_cpu_s"] = of[name].median("cpu_s") if name in of else None
        figures[f"{name}_wall_s"] = of[name].median("wall_s") if name in of else None
        if name != OURS:
            ratio = ratio_over_rounds(of.get(OURS), of.get(name), lambda step: step["cpu_s"])
            figures["ratio" if name == PLAIN else f"ratio_to_{name}"] = ratio
    return figures


@click.command()
@click.option("--peers", multiple=True, help="maxtext, in an environment that is made for it.")
@click.option("--steps", default=10, show_default=True, help="Measured steps.")
@click.option("--quick", is_flag=True, help="Tiny jobs: shows that all runs, measures nothing.")
def main(peers: tuple[str, ...], steps: int, quick: bool) -> None:
    """Print the figures as one JSON object."""
    say = lambda line: click.echo(line, err=True)  # noqa: E731
    click.echo(json.dumps(run(find_peers(peers, BENCHMARK), steps, say, quick=quick)))


if __name__ == "__main__":
    main()
