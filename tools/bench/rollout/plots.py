"""Plots of `axl bench rollout` for the docs, and its tables in their page.

    axl bench rollout --json | tail -n 1 > docs/figures/rollout.json
    python -m tools.bench.rollout.plots

Output is deterministic to the byte. Needs matplotlib (the extra `dev`).
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mesh.errors import UserError
from tools.bench.rollout.tables import Table, tables

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_DOCS = Path(__file__).resolve().parents[3] / "docs"
_PERCENTILES = (("p50", "-"), ("p95", "--"), ("p99", ":"))


def main(docs: Path = _DOCS) -> None:
    """Write the plots beside `docs/figures/rollout.json`, and the marked part of `docs/benchmarks/rollout.md`.

    Raises:
        UserError: no stored result, or one of a quick run; or the page has no marks.
    """
    stored = docs / "figures" / "rollout.json"
    if not stored.is_file():
        raise UserError(f"{stored} does not exist; store the last line of `axl bench rollout --json` there")
    result = json.loads(stored.read_text())
    if result["quick"]:
        raise UserError(f"{stored} comes from a run with --quick, whose figures mean nothing")
    draw(result, stored.parent)
    page = docs / "benchmarks" / "rollout.md"
    page.write_text(fill_in(page.read_text(), result))


def draw(result: Mapping[str, Any], folder: Path) -> None:
    """Write `rollout_throughput.svg` and `rollout_latency.svg` into a folder; both are against concurrency."""
    sweep = result["concurrency_sweep"]
    max_num_seqs = [point["max_num_seqs"] for point in sweep]

    figure, axes = _figure("tokens per second")
    for key, label in (("tok_per_s", "by wall second"), ("tok_per_cpu_s", "by CPU second")):
        axes.plot(max_num_seqs, [point[key] for point in sweep], marker="o", label=label)
    axes.set_ylim(bottom=0)
    _save(figure, axes, folder / "rollout_throughput.svg")

    figure, axes = _figure("milliseconds")
    for color, (key, label) in enumerate((("latency_ms", "whole request"), ("first_token_ms", "first token"))):
        for percentile, line in _PERCENTILES:
            values = [point[key][percentile] for point in sweep]
            axes.plot(max_num_seqs, values, line, marker=".", color=f"C{color}", label=f"{label}, {percentile}")
    axes.set_yscale("log")
    _save(figure, axes, folder / "rollout_latency.svg")


def fill_in(page: str, result: Mapping[str, Any]) -> str:
    """Return the page with the result's circumstances and tables between its marks.

    Raises:
        UserError: the marks are not there.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"the page of figures lacks its marks {BEGIN} and {END}")
    parts = [_circumstances(result), *map(_markdown, tables(result))]
    return "\n\n".join([before + begin, *parts, end + after])


def _circumstances(result: Mapping[str, Any]) -> str:
    where = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return (
        f"`{result['command']}`, {result['date']}; {where['cores']} cores of {where['cpu']}, of which each process "
        f"used one; load {where['load']} before the run; {versions}."
    )


def _markdown(table: Table) -> str:
    lines = [table.columns, ["---", *["---:"] * (len(table.columns) - 1)], *table.rows]
    title = table.title[0].upper() + table.title[1:]
    return "\n".join([f"{title}.", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _figure(unit: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("max_num_seqs: requests at a time")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    axes.legend(frameon=False)
    # Without a salt and with a date, each run would write different bytes; text stays text.
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
