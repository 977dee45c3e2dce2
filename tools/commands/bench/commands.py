"""Benchmarks of a step of RL and of generation, beside peers; of weights, of servers and of the sandbox."""

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from mesh.errors import UserError
from tools.bench.harness.checkout import of_checkout
from tools.commands.bench.group import command, find_benchmark
from tools.commands.bench.options import (
    add_sectioned,
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
add_sectioned(
    "weights", "Speed of push and pull of a gigabyte of weights on this machine, beside a raw stream and a copy."
)


@command.command(name="serve")
@click.argument("name", default="demo")
@click.option("--warmup", type=click.Choice(["none", "background", "full"]), default="full", show_default=True)
@click.option("--passes", default=5, show_default=True, type=click.IntRange(min=1), help="Passes of each load.")
@click.option("--seed", default=0, show_default=True, help="Seed of the order of passes, and of prompts.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="A further field of the experiment.")
@quick_option
@json_option
def serve(name: str, warmup: str, passes: int, seed: int, sets: tuple[str, ...], quick: bool, as_json: bool) -> None:
    """Tokens a second of `axl serve` after a start with an empty compilation cache: of each load the worst pass.

    NAME is an experiment, which is served with random weights, prompts of up to 48 tokens and answers of up to 64.
    """
    from tools.bench.harness.processes import MeasurementFailed
    from tools.bench.rollout.serving import benchmark as bench

    job = bench.Job(name, (*bench.SIZES, *sets), warmup, passes, seed=seed)
    if quick:
        job = bench.Job(name, (*bench.SIZES, *sets), warmup, 1, {"1": 2, "8": 8}, seed)
    with progress() as say:
        try:
            result = bench.run(job, say)
        except MeasurementFailed as error:
            raise UserError(str(error)) from None
    report(result, as_json, failed=False)


@command.command(name="verify")
@json_option
def verify(as_json: bool) -> None:
    """Attack the sandbox of this machine, and say what came of it; measure the reaping of hangs; test verifiers."""
    from tools.bench.verify import benchmark as bench

    figures = bench.measure()
    through = figures["attacks_through"] + figures["without_namespaces"].get("attacks_through", [])
    report(figures, as_json, failed=bool(through) or any(figures["self_test_mistakes"].values()))
