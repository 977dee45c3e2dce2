"""Benchmarks of block sizes, the sandbox and retrieval."""

from __future__ import annotations

from typing import Any

import click

from tools.commands.bench.group import command
from tools.commands.bench.options import json_option, names_in, progress, quick_option, report, sections_option


@command.command(name="block_sizes")
@click.option("--kv-heads", default=8, show_default=True, type=click.IntRange(1), help="Key-value heads of one device.")
@click.option("--per-head", "per_kv", default=4, show_default=True, type=click.IntRange(1), help="Query heads of each.")
@click.option(
    "--width", "head_dim", default=128, show_default=True, type=click.IntRange(min=1), help="Width of a head."
)
@click.option("--page-size", default=16, show_default=True, type=click.IntRange(min=1), help="Tokens of a page.")
@click.option("--rows", default=64, show_default=True, type=click.IntRange(min=1), help="Sequences that decode.")
@click.option("--keys", default=4096, show_default=True, type=click.IntRange(min=64), help="Tokens of each sequence.")
@click.option("--vmem-mib", type=click.IntRange(min=1), help="Limit of vector memory; default: the compiler's.")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1), help="Turns of each candidate.")
@quick_option
@json_option
def block_sizes(rounds: int, quick: bool, as_json: bool, **sizes: Any) -> None:
    """Time block sizes of paged attention on the TPU of this machine, for the fields of `engine.kernel`.

    Candidates that disagree with XLA there are refused.
    """
    from tools.bench.kernels import tune
    from tools.bench.kernels.candidates import Job

    tune.check(quick=quick)
    with progress() as say:
        result = tune.timed(tune.QUICK if quick else Job(**sizes), 1 if quick else rounds, say)
    report(result, as_json, failed=False)


@command.command(name="verify")
@json_option
def verify(as_json: bool) -> None:
    """Attack the sandbox of this machine, and say what came of it; measure the reaping of hangs; test verifiers."""
    from tools.bench.verify import benchmark as bench

    figures = bench.measure()
    through = figures["attacks_through"] + figures["without_namespaces"].get("attacks_through", [])
    report(figures, as_json, failed=bool(through) or any(figures["self_test_mistakes"].values()))


@command.command(name="retrieval")
@sections_option
@click.option("--peers", default="", metavar="NAMES", help="faiss, in an environment that is made for it.")
@quick_option
@json_option
def retrieval(sections: list[str], peers: str, quick: bool, as_json: bool) -> None:
    """Retrieval for many tenants: microseconds, recall and memory, beside faiss; results that a tenant may not see."""
    from tools.bench.retrieval import benchmark as bench

    with progress() as say:
        result = bench.run(sections, say, names_in(peers), quick=quick)
    report(result, as_json, failed=bool(result.get("foreign_results") or result.get("errors")))
