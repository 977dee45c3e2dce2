"""The benchmarks that have sections and no other options, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tools.commands.bench.group import command, find_benchmark
from tools.commands.bench.options import json_option, progress, quick_option, report, sections_option

_ENDS = "Figures are shown as they come. Ctrl-C ends it with those that there are, and names the missing sections."


def _never(result: Mapping[str, Any]) -> bool:
    return False


def add(name: str, says: str, failed: Callable[[Mapping[str, Any]], bool] = _never) -> None:
    """Add the command of a benchmark whose module has `SECTIONS` and `run(sections, say, quick=...)`.

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
        bench = find_benchmark(name)
        with progress() as say:
            result = bench.run(sections, say, quick=quick)
        report(result, as_json, failed=failed(result))


add(
    "kernels",
    "Kernels by numpy, XLA and simulated Pallas: values against float64, stages of a call, where offloading pays.\n\n"
    "One of them is decoding of LDPC codes, with its bit errors beside those of the sum-product.",
)
add("weights", "Speed of push and pull of a gigabyte of weights on this machine, beside a raw stream and a copy.")
