"""Benchmarks of servers and of the sandbox."""

from __future__ import annotations

import click

from mesh.errors import UserError
from tools.commands.bench.group import command
from tools.commands.bench.options import json_option, progress, quick_option, report


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
