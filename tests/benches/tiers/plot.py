"""A plot of bits a value against error, a panel for each tensor.

    python -m tests.benches.tiers.plot RESULT.json docs/figures/lossy_codecs.svg

The argument is what `axl bench tiers --sections codecs --json` printed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.studies.learning.plot import COLOURS, STYLE
from tools.report.svg import Plot, element, text

_WIDTH, _HEIGHT, _ACROSS, _KEY = 250, 200, 4, 30
CODECS = ("rtn", "ecsq", "hevc", "int8", "bf16")


def draw(bits: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return an SVG document of the table `bits` of a result."""
    panels = []
    for number, (name, rows) in enumerate(bits.items()):
        plot = Plot(_WIDTH, _HEIGHT, (-5.6, -0.9), (0, 17), name=name, labels=("log10 of the error", f"{name}, bits"))
        for index, codec in enumerate(CODECS):
            points = sorted((math.log10(row["error"]), row[codec]) for row in rows.values() if codec in row)
            plot.line(points, f"k{index}")
            plot.dots(points, f"k{index}", radius=2)
        x, y = number % _ACROSS * _WIDTH, _KEY + number // _ACROSS * _HEIGHT
        panels.append(element("g", "".join(plot.parts), transform=f"translate({x} {y})"))
    width, height = _ACROSS * _WIDTH, _KEY + -(-len(bits) // _ACROSS) * _HEIGHT
    key = [
        element("path", d=f"M{20 + 110 * index} 14h18", class_=f"line k{index}") + text(44 + 110 * index, 18, codec)
        for index, codec in enumerate(CODECS)
    ]
    styled = [f".k{index} {{ stroke: {one}; }} .dots {{ stroke-linecap: round; }}" for index, one in enumerate(COLOURS)]
    page = element("rect", x=0, y=0, width=width, height=height, class_="page")
    body = element("style", STYLE + "\n".join(styled)) + page + "".join(key) + "".join(panels)
    box: dict[str, Any] = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    drawn = element("svg", body, role="img", aria_label="Bits a value against error", **box)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


if __name__ == "__main__":
    result, target = sys.argv[1:]
    Path(target).write_text(draw(json.loads(Path(result).read_text().splitlines()[-1])["bits"]))
