"""What a compiled step is by code and compiler alone, as text with one fact in a line: to be stored and compared.

Times and figures of the machine are left out, and so is the place of code in its file.
"""

import re
from collections.abc import Iterator

from tools.aot.programs import described
from tools.aot.report import Report

_MEMORY = ("arguments", "output", "alias", "temp", "host", "peak")


def golden_lines(report: Report) -> list[str]:
    """Of a report of `report_dict`: memory, collectives, arguments with their partitions, and the largest arrays."""
    return [
        f"step: {report['step']}",
        f"mesh: {described(report['mesh'])}",
        f"fits: {'yes' if report['fits'] else 'no'}",
        *_memory(report),
        f"kept for the backward pass: {_size(report['kept_for_backward'])}",
        f"FLOPs of the model: {report['flops_analytic']:.6g}",
        f"FLOPs executed: {report['flops_executed']:.6g}",
        *_collectives(report),
        *(f"argument {one}" for one in report["arguments"]),
        *_largest(report),
    ]


def _memory(report: Report) -> Iterator[str]:
    if report["hbm"] is None:
        yield f"memory: {report['oom']['what']} need {_size(report['oom']['needed'])}"
        return
    for name in _MEMORY:
        yield f"memory {name}: {_size(report['hbm'][name])}"


def _collectives(report: Report) -> Iterator[str]:
    for axis, kinds in (report["collectives"] or {}).items():
        for kind, row in kinds.items():
            # Small all-reduces are joined to larger ones, not alike each time that the same program is compiled.
            times = "" if kind == "all-reduce" else f"{row['count']} times, "
            yield f"collective over {axis}, {kind}: {times}{_size(row['bytes'])} received"


def _largest(report: Report) -> Iterator[str]:
    for row in report["largest_buffers"]:
        path = row["path"] if row["what"] == "argument" else re.sub(r"\.\d+$", "", row["path"])  # the compiler's count
        yield f"large array: {_size(row['bytes'])} {row['array']} {row['what']} {path}"


def _size(count: int) -> str:
    """To a hundredth of a MiB: what is smaller is no news."""
    return f"{count / (1 << 20):,.2f} MiB"
