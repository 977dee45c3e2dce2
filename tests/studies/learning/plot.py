"""Plots of the study: by section the mean reward of its runs over updates, with the range of seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.studies.learning.job import SECTIONS
from tools.report.charts import moving_mean, window
from tools.report.svg import Plot, element, limits, text

_WIDTH, _HEIGHT, _KEY = 760, 330, 150
COLOURS = ("#2a78d6", "#d65f2a", "#2a9d5c", "#a04bc8", "#c23b6b", "#8a6d1f", "#1f8a8a", "#5a6472")
# The file stands alone; its colours are read on a light and on a dark page.
STYLE = """
svg { font: 12px system-ui, sans-serif; --ink: #16191f; --soft: #4f5763; --grid: #e3e6eb; --page: #fff; }
@media (prefers-color-scheme: dark) { svg { --ink: #eceef2; --soft: #b3bac5; --grid: #2a2f38; --page: #0f1115; } }
text { fill: var(--ink); } .tick, .unit { fill: var(--soft); } .grid { stroke: var(--grid); }
.axis { stroke: var(--soft); } .page { fill: var(--page); } .line { fill: none; stroke-width: 2; }
.band { stroke: none; fill-opacity: 0.12; }
"""


def write_plots(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `learning_SECTION.svg` for each section with two runs or more, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for section, names in SECTIONS.items():
        curves = {name: list(result["curves"][name].values()) for name in names if name in result["curves"]}
        if len(curves) > 1:
            path = folder / f"learning_{section}.svg"
            path.write_text(draw(section, curves))
            written.append(path)
    return written


def draw(section: str, curves: Mapping[str, list[list[float]]]) -> str:
    """Return an SVG document: by run a moving mean of the mean over seeds, and the range of the seeds' own."""
    smooth: dict[str, list[tuple[float, float, float, float]]] = {}  # update, mean, lowest, highest
    for name, seeds in curves.items():
        width = window(len(seeds[0]))
        each = [[y for _, y in moving_mean(list(enumerate(values)), width)] for values in seeds]
        smooth[name] = [
            (float(x), statistics.fmean(ys), min(ys), max(ys)) for x, ys in enumerate(zip(*each, strict=True))
        ]
    every = [y for points in smooth.values() for _, _, low, high in points for y in (low, high)]
    longest = max(len(points) for points in smooth.values()) - 1
    name = f"Reward over updates: {section}"
    plot = Plot(_WIDTH - _KEY, _HEIGHT, (0, longest), limits(every), name=name, labels=("update", "reward"))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(smooth)}
    styled = [f".k{index} {{ stroke: {one}; fill: {one}; }} .line.k{index} {{ fill: none; }}"
              for index, one in enumerate(colours.values())]  # fmt: skip
    key: list[str] = []
    for index, (label, points) in enumerate(smooth.items()):
        upper = "L".join(f"{plot.x(x):.1f} {plot.y(high):.1f}" for x, _, _, high in points)
        lower = "L".join(f"{plot.x(x):.1f} {plot.y(low):.1f}" for x, _, low, _ in reversed(points))
        plot.add(element("path", d=f"M{upper}L{lower}Z", class_=f"band k{index}"))
        y = 34 + 20 * index
        key.append(element("path", d=f"M{_WIDTH - _KEY + 8} {y - 4}h18", class_=f"line k{index}"))
        key.append(text(_WIDTH - _KEY + 32, y, f"{label}  {points[-1][1]:.2f}"))
    for index, points in enumerate(smooth.values()):
        plot.line([(x, mean) for x, mean, _, _ in points], f"k{index}")
    page = element("rect", x=0, y=0, width=_WIDTH, height=_HEIGHT, class_="page")
    body = element("style", STYLE + "\n".join(styled)) + page + "".join(plot.parts) + "".join(key)
    box = {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "width": _WIDTH, "height": _HEIGHT}
    drawn = element("svg", body, role="img", aria_label=name, **box)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"
