"""A model's step from a few chips to thousands, on paper: docs/benchmarks/scaling.md, from reports of `axl aot --json`.

    python -m tests.studies.scaling docs/figures/scaling.json                      # the table
    python -m tests.studies.scaling docs/figures/scaling.json --add 512=step.json  # keep what it needs of a report

Every chip has the same rows, whatever the number of chips. Parameters are sharded over `fsdp` chips of a slice; more
chips are data-parallel, and so are slices. Between the sizes that were compiled, bytes follow the usual algorithms
((n - 1) / n of what is gathered), and memory is a part that is sharded over `fsdp` and a part that is not.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from mesh.generations import GENERATIONS
from mesh.topology import parse_topology

LARGEST_FSDP = 64  # see experiments/pretraining.py
LARGEST_SLICE = 1024
SIZES = tuple(2**n for n in range(3, 14))
_KEPT = ("topology", "slices", "devices", "mesh", "fits", "hbm", "rows", "length", "flops_analytic", "flops_executed",
         "flops_in_kernels", "collectives", "roofline_s", "exposed_s", "estimated_step_s", "mfu_estimate",
         "versions")  # fmt: skip


class Facts(NamedTuple):
    """Figures of the compiled steps.

    Attributes:
        busy: seconds of computation in a step.
        sharded, replicated: bytes of memory that are sharded over `fsdp`, and that are not.
        gathered: bytes that `fsdp` would exchange over infinitely many chips.
        summed: bytes of gradients of all parameters, as they are summed over `data`.
        rate: bytes/s that a chip receives over `fsdp` where that is a part of a slice.
        available: bytes of a chip.
        tokens: tokens of a chip.
        flops: FLOPs of the model, of a chip.
    """

    busy: float
    sharded: float
    replicated: float
    gathered: float
    summed: float
    rate: float
    available: float
    tokens: float
    flops: float


class Row(NamedTuple):
    """A line of the table; bytes and seconds of one chip and one step."""

    chips: int
    slices: int
    fsdp: int
    memory: float
    fits: bool
    fsdp_bytes: float
    data_bytes: float
    dcn_bytes: float
    ici: float
    dcn: float
    covered_from: float  # tokens of a chip from which on computation takes as long as communication


def facts(reports: Sequence[Mapping[str, Any]]) -> Facts:
    """Derive the figures from reports of one slice with the same rows per chip.

    They must have two sizes of `fsdp` or more, and one of them `data`, too.

    Raises:
        click.ClickException: there are too few.
    """
    single = sorted((r for r in reports if r["slices"] == 1 and r["fits"]), key=lambda r: fsdp_of(r))
    summed = [r for r in single if r["mesh"].get("data", 1) > 1]
    if not summed or len({fsdp_of(r) for r in single}) < 2:
        raise click.ClickException("expected reports of two sizes of fsdp or more, one of them with data too")
    first, last = single[0], single[-1]
    few, many = fsdp_of(first), fsdp_of(last)
    sharded = (memory_of(first) - memory_of(last)) / (1 / few - 1 / many)
    data = summed[0]["mesh"]["data"]
    return Facts(
        busy=last["estimated_step_s"] - last["exposed_s"],
        sharded=sharded,
        replicated=memory_of(last) - sharded / many,
        gathered=axis_bytes(last, "fsdp") * many / (many - 1),
        summed=axis_bytes(summed[0], "data") * fsdp_of(summed[0]) / (2 * (data - 1) / data),
        rate=axis_bytes(summed[0], "fsdp") / summed[0]["roofline_s"]["link fsdp"],
        available=last["hbm"]["available"],
        tokens=last["rows"] * last["length"] / last["devices"],
        flops=last["flops_analytic"] / last["devices"],
    )


def row(known: Facts, chips: int, generation: str = "v5p") -> Row:
    """Return the line for so many chips."""
    chip = GENERATIONS[generation]
    slices = max(1, chips // LARGEST_SLICE)
    inside = chips // slices
    fsdp = min(inside, LARGEST_FSDP)
    data = inside // fsdp
    fsdp_bytes = known.gathered * (fsdp - 1) / fsdp
    data_bytes = 2 * known.summed / fsdp * (data - 1) / data
    dcn_bytes = 2 * known.summed / inside * (slices - 1) / slices
    whole = links(parse_topology(f"{generation}-{inside * chip.counted}").shape) * chip.link
    ici = (fsdp_bytes + data_bytes) / (whole if data == 1 else known.rate)
    dcn = dcn_bytes / chip.dcn
    memory = known.sharded / fsdp + known.replicated
    return Row(
        *(chips, slices, fsdp, memory, memory <= known.available, fsdp_bytes, data_bytes, dcn_bytes, ici, dcn),
        covered_from=known.tokens * (ici + dcn) / known.busy,
    )


def links(shape: Sequence[int]) -> int:
    """Return the links by which a chip of a complete slice receives: two for a dimension that is closed to a ring."""
    return sum(2 if size > 2 and size % 4 == 0 else 1 for size in shape if size > 1)


def fsdp_of(report: Mapping[str, Any]) -> int:
    """Return the size of the axis `fsdp`."""
    return report["mesh"].get("fsdp", 1)


def memory_of(report: Mapping[str, Any]) -> int:
    """Bytes of arguments, results that lie elsewhere, and temporaries: no less than the program needs."""
    plan = report["hbm"]
    return plan["arguments"] + plan["temp"] + plan["output"] - plan["alias"]


def axis_bytes(report: Mapping[str, Any], axis: str) -> int:
    """Bytes that a chip receives over an axis alone."""
    return sum(kind["bytes"] for kind in report["collectives"].get(axis, {}).values())


def table(known: Facts) -> str:
    """Markdown."""
    lines = [
        "| chips | slices x chips | fsdp x data | memory, GB | fsdp, GB | data, GB | slices, GB | ICI, s | DCN, s "
        "| computing, s | tokens needed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in (row(known, chips) for chips in SIZES):
        inside = one.chips // one.slices
        memory = f"{one.memory / 1e9:.1f}" + ("" if one.fits else ": does not fit")
        figures = f"{one.fsdp_bytes / 1e9:.0f} | {one.data_bytes / 1e9:.2f} | {one.dcn_bytes / 1e9:.2f}"
        times = f"{one.ici:.2f} | {one.dcn:.2f} | {known.busy:.1f} | {one.covered_from:,.0f}"
        where = f"{one.slices} x {inside} | {one.fsdp} x {inside // one.fsdp}"
        lines.append(f"| {one.chips:,} | {where} | {memory} | {figures} | {times} |")
    return "\n".join(lines)


@click.command()
@click.argument("stored", type=click.Path(path_type=Path))
@click.option("--add", "added", multiple=True, metavar="NAME=REPORT", help="Keep a report under this name.")
@click.option("--only", default="weak", show_default=True, help="Names of the reports for the table begin with it.")
def main(stored: Path, added: tuple[str, ...], only: str) -> None:
    """Print the table of the reports in STORED."""
    reports: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    for one in added:
        name, _, path = one.partition("=")
        report = json.loads(Path(path).read_text())
        reports[name] = {key: report[key] for key in _KEPT}
    if added:
        stored.write_text(json.dumps(reports, indent=1, sort_keys=True) + "\n")
        return
    click.echo(table(facts([report for name, report in reports.items() if name.startswith(only)])))


if __name__ == "__main__":
    main()
