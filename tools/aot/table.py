"""The report of `axl aot` on the console."""

import math
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from axlearn_like.config import ConfigBase
from axlearn_like.remat import PRESETS
from mesh.cost.roofline import EXPECTED
from mesh.cost.traced_buffers import kept_for_backward
from tools.aot.report import Report
from tools.aot.run import Outcome, described, tuning_of

_GIB = 1 << 30


def print_report(report: Report, advice: Iterable[str] = (), console: Console | None = None) -> None:
    """Print verdict, memory, time, collectives and the largest arrays."""
    console = console or Console()
    where = report["topology"] if report["slices"] == 1 else f"{report['slices']} x {report['topology']}"
    console.print(Text(f"{report['step']} on {where} ({report['sold_as']}, {report['devices']} devices): "), end="")
    console.print(Text(described(report["mesh"])))
    if report["hbm"] is not None:
        hbm = report["hbm"]
        verdict = "fits" if report["fits"] else "does not fit"
        parts = ", ".join(f"{name} {hbm[name] / _GIB:.2f}" for name in ("arguments", "temp", "output", "alias"))
        console.print(Text(f"{verdict}: peak {hbm['peak'] / _GIB:.2f} of {hbm['available'] / _GIB:.2f} GiB ({parts})"))
    else:
        console.print(Text(f"does not fit: {report['oom']['message']}", style="red"))
        for line in advice:
            console.print(Text(f"  try {line}"))
    console.print(Text(f"FLOPs of the model {report['flops_analytic']:.4g} ({report['flops_of']}), "), end="")
    console.print(Text(f"executed {report['flops_executed']:.4g}"))
    if report["estimated_step_s"] is not None:
        bounds = ", ".join(f"{name} {seconds:.4g}" for name, seconds in report["roofline_s"].items())
        least, most = EXPECTED
        if report["unknown_loops"]:
            guessed = f"{report['unknown_loops']} loops of unknown length count once in all that follows"
            console.print(Text(guessed, style="red"))
        console.print(Text(f"lower bounds in s: {bounds}"))
        console.print(
            Text(
                f"estimated step {report['estimated_step_s']:.4g} s ({least} to {most} times that), of which "
                f"exposed communication {report['exposed_s']:.4g}; MFU about {report['mfu_estimate']:.0%}"
            )
        )
        console.print(_collectives(report["collectives"]))
    console.print(_buffers(report["largest_buffers"]))
    console.print(
        Text(
            f"compiled in {report['compile_s']:.1f} s ({report['compile_cpu_s']:.1f} CPU-s with tracing), host memory "
            f"{report['host_rss'] / 1e9:.2f} GB; what each figure is worth: docs/reference/aot.md"
        )
    )


def _collectives(axes: dict[str, Any]) -> Table:
    table = Table("axes", "collective", "count", "MiB received", "overlapped", box=None, pad_edge=False)
    for axis, kinds in axes.items():
        for kind, row in kinds.items():
            share = row["overlapped"] / row["bytes"] if row["bytes"] else 0.0
            table.add_row(axis, kind, str(row["count"]), f"{row['bytes'] / (1 << 20):.1f}", f"{share:.0%}")
    return table


def _buffers(rows: list[dict[str, Any]]) -> Table:
    table = Table("MiB", "largest arrays", "pass", "layer", box=None, pad_edge=False)
    for row in rows:
        size = f"{row['bytes'] / (1 << 20):.1f}"
        where = f"{row['path']} {row['source']}".strip()
        table.add_row(size, Text(row["array"]), row["what"], Text(where, overflow="fold"))
    return table


def advice(cfg: ConfigBase[Any], outcome: Outcome) -> list[str]:
    """Return edits to try, as --set takes them where they are edits; empty if the step fits."""
    shortage = outcome.compiled.shortage
    if shortage is None:
        return []
    if outcome.program.name in ("prefill", "decode"):
        return [
            "fewer pages or sequences: --set engine.pages=... or --set engine.max_num_seqs=...",
            "tensor parallelism over more devices: a larger --topology",
        ]
    tuning = tuning_of(cfg)
    state = argument_bytes(outcome.compiled.jaxpr)
    held = getattr(tuning.model, "remat", None)
    presets = remat_presets()
    stronger = presets[presets.index(held) + 1 :] if held in presets else []
    found: list[tuple[int, str]] = []
    if outcome.program.name == "train":
        found += [(1, f"more recomputation: --set {tuning.model_field}.remat={name}") for name in stronger[::-1][:2]]
        more = f"--set {tuning.prefix}microbatches={2 * tuning.microbatches}"
        found.append((2, f"more, smaller microbatches: {more}"))
    if not tuning.chunked:
        found.append((3, "the head's logits in chunks: --set loss.chunks=8"))
    mesh = dict(outcome.compiled.mesh.shape)
    if mesh["data"] > 1:
        wider = {n: s for n, s in {**mesh, "fsdp": mesh["fsdp"] * mesh["data"], "data": 1}.items() if s > 1}
        first = 0 if state > shortage.available // 2 else 4
        found.append((first, f'parameters over more devices: --set "{tuning.prefix}mesh={wider}"'))
    first = 0 if state > shortage.available else 5
    found.append((first, "more devices: a larger --topology, with a larger fsdp axis"))
    return [text for _, text in sorted(found, key=lambda one: one[0])]


def remat_presets() -> list[str]:
    """Return the names that `Decoder.Config.remat` takes, from the most memory to the least."""
    return list(PRESETS)


def argument_bytes(jaxpr: Any) -> int:
    """Return the bytes that a traced program reads, per device: parameters, optimizer state and batch."""
    avals = jaxpr.in_avals
    return sum(math.prod(aval.sharding.shard_shape(aval.shape)) * aval.dtype.itemsize for aval in avals)


def at_least(jaxpr: Any) -> int:
    """Return the bytes of one device that a train step needs at least.

    These are its arguments and what it keeps for the backward pass; gradients, logits and temporaries come on top.
    """
    return argument_bytes(jaxpr) + kept_for_backward(jaxpr)
