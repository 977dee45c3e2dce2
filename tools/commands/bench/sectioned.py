"""The benchmarks that have sections and no other options, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from tools.commands.bench.group import command
from tools.commands.bench.options import json_option, progress, quick_option, report, sections_option

_ENDS = "Figures are shown as they come. Ctrl-C ends it with those that there are, and names the missing sections."


def _never(result: Mapping[str, Any]) -> bool:
    return False


def add(name: str, says: str, failed: Callable[[Mapping[str, Any]], bool] = _never) -> None:
    """Add the command of `tools.bench.NAME.benchmark`, which has `SECTIONS` and `run(sections, say, quick=...)`.

    Args:
        name: its name.
        says: what it measures, as help says it.
        failed: True for a result that ends with status 1.
    """

    @command.command(name=name, help=f"{says}\n\n{_ENDS}")
    @sections_option
    @quick_option
    @json_option
    def measure(sections: list[str], quick: bool, as_json: bool) -> None:
        bench = import_module(f"tools.bench.{name}.benchmark")
        with progress() as say:
            result = bench.run(sections, say, quick=quick)
        report(result, as_json, failed=failed(result))


add(
    "policies",
    "Many policies on one fleet: RL beside each alone, and a service's slots, first tokens and fairness.",
)
add(
    "episodes",
    "Episodes with tools, tools that start while they are called, and plans that are answered in parallel.",
)
add(
    "tiers",
    "Pages of a KV cache on the host against computing again, requests that move, and codecs of tensors.",
)
add(
    "kernels",
    "Kernels by numpy, XLA and simulated Pallas: values against float64, stages of a call, where offloading pays.\n\n"
    "One of them is decoding of LDPC codes, with its bit errors beside those of the sum-product.",
)
add(
    "experts",
    "Replicas of popular experts: load of the busiest device, seconds of plans; attention and experts apart.",
    lambda result: "not_measured_training" in result,
)
add(
    "simulate",
    "Simulated runs against real ones, the cost of planning a large run, and CPU time of the controller.\n\n"
    "`accuracy` runs real jobs of several processes and predicts each from the measurement of one.",
)
