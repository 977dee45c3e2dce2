"""Commands `axl bench NAME` that only a checkout has: each measures what this project says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tools.commands.bench.group import command
from tools.commands.bench.options import (
    add_sectioned,
    json_option,
    names_in,
    progress,
    quick_option,
    report,
    sections_option,
)
from tools.commands.examples import EXAMPLES
from tools.experiment import LocalPath, Number

EXAMPLES |= {
    "bench bisect": ("--quick", "--json"),
    "bench episodes": ("--quick", "--sections partial --json"),
    "bench experts": ("--quick", "--sections plans --json"),
    "bench kernels": ("--quick", "--sections bit_errors --json"),
    "bench policies": ("--quick", "--sections fairness --json"),
    "bench recovery": ("--kills 1 --minutes 5", "--roles worker,trainer --json"),
    "bench retrieval": ("--quick", "--peers faiss --sections latency --json"),
    "bench simulate": ("--quick", "--sections control --json"),
    "bench tiers": ("--quick", "--sections move --json"),
}

add_sectioned(
    "policies",
    "Many policies on one fleet: RL beside each alone, and a service's slots, first tokens and fairness.",
)
add_sectioned(
    "episodes",
    "Episodes with tools, tools that start while they are called, and plans that are answered in parallel.",
)
add_sectioned(
    "tiers",
    "Pages of a KV cache on the host against computing again, requests that move, and codecs of tensors.",
)
add_sectioned(
    "kernels",
    "Kernels by numpy, XLA and simulated Pallas: values against float64, stages of a call, where offloading pays.\n\n"
    "One of them is decoding of LDPC codes, with its bit errors beside those of the sum-product.",
)
add_sectioned(
    "experts",
    "Replicas of popular experts: load of the busiest device, seconds of plans; elastic training under kills.",
    lambda result: "not_measured_training" in result,
)
add_sectioned(
    "simulate",
    "Simulated runs against real ones, the cost of planning a large run, and CPU time of the controller.\n\n"
    "`accuracy` runs real jobs of several processes and predicts each from the measurement of one.",
)


@command.command(name="bisect")
@quick_option
@json_option
def bisect(quick: bool, as_json: bool) -> None:
    """Inject faults into one of two equal runs (an ulp, a reward, a token, a flag): which of them are located.

    Each is shown as it comes. Ctrl-C ends it with those that there are.
    """
    from tests.benches.recovery.injected_faults import benchmark as bench

    with progress() as say:
        result = bench.run(say, quick=quick)
    report(result, as_json, failed=result["located"] < result["faults"] or result["interrupted"] is not None)


@command.command(name="retrieval")
@sections_option
@click.option("--peers", default="", metavar="NAMES", help="faiss, in an environment that is made for it.")
@quick_option
@json_option
def retrieval(sections: list[str], peers: str, quick: bool, as_json: bool) -> None:
    """Retrieval for many tenants: microseconds, recall and memory, beside faiss; results that a tenant may not see."""
    from tests.benches.retrieval import benchmark as bench

    with progress() as say:
        result = bench.run(sections, say, names_in(peers), quick=quick)
    report(result, as_json, failed=bool(result.get("foreign_results") or result.get("errors")))


@command.command(name="recovery")
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=1), help="Kills of each role.")
@click.option("--roles", default="", help="Comma-separated roles to kill; default: all, and driver, raylet, command.")
@click.option("--seed", default=0, show_default=True, help="Seed of the order of the kills and of their moments.")
@click.option("--minutes", type=Number(0), help="Start no further kill after this time; default: make them all.")
@click.option(
    "--every",
    type=Number(0),
    default=0.0,
    help="Least seconds from one kill to the next.",
)
@click.option("--spares", default=1, show_default=True, type=click.IntRange(0, 1), help="Warm processes that take over "
              "from the trainer, and from workers.")  # fmt: skip
@click.option("--keep", type=LocalPath(path_type=Path), help="A new directory to keep the runs in.")
@json_option
def recovery(kills: int, roles: str, keep: Path | None, as_json: bool, **how: Any) -> None:
    """Seconds from SIGKILL of a role to the next update, and whether the run's result is the same to the bit."""
    from mesh.programs.compilation import enable_compilation_cache
    from tests.benches.recovery import benchmark as bench

    chosen = bench.find_roles(names_in(roles))
    enable_compilation_cache()
    with progress() as say:
        result = bench.run(bench.Kills(kills, chosen, **how), say, keep=keep)
    report(result, as_json, failed=not bench.succeeded(result))
