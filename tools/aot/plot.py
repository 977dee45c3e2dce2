"""The plot of a sweep: memory of each candidate, and its estimated time with the estimate's error."""

from typing import Any

from tools.aot.programs import described
from tools.aot.report import Report
from tools.report.svg import Scale, element, nice_ticks, number_label, picture, text

_GIB = 1 << 30
_WIDTH, _ROW, _TOP, _BOTTOM = 920, 34, 84, 42
_LABELS, _GAP, _MARGIN = 236, 48, 20
_BAR = 14
# The file stands alone: its colours are those of the reports' style sheet, in light and dark.
_STYLE = """
svg { font: 13px system-ui, sans-serif; --ink: #16191f; --soft: #4f5763; --grid: #e3e6eb; --a: #2a78d6; --b: #9cc3f0;
  --bad: #c2312f; --page: #fff; }
@media (prefers-color-scheme: dark) { svg { --ink: #eceef2; --soft: #b3bac5; --grid: #2a2f38; --a: #4a94ea;
  --b: #24507f; --bad: #ff7b72; --page: #0f1115; } }
text { fill: var(--ink); } .soft { fill: var(--soft); } .head { font-weight: 600; } .no { fill: var(--bad); }
.page { fill: var(--page); } .grid { stroke: var(--grid); } .limit { stroke: var(--bad); stroke-dasharray: 4 3; }
.held { fill: var(--a); } .more { fill: var(--b); } .range { stroke: var(--a); stroke-width: 2; fill: none; }
"""


def draw_sweep(result: Report) -> str:
    """Return an SVG document with a line for each candidate of a sweep, in its order.

    Left: the arguments and, paler, the rest of the peak, in GiB of one device, against what is available. Right: the
    estimated step in seconds, with the range in which a real one is expected.

    Args:
        result: result of `run_sweep`, with `experiment`.
    """
    rows = result["tried"]
    height = _TOP + _ROW * len(rows) + _BOTTOM
    half = (_WIDTH - _LABELS - _GAP - _MARGIN) / 2
    memory_end, bottom = _LABELS + half, height - _BOTTOM
    available = result["available"] / _GIB
    least, most = result["error"]
    slowest = max([row["estimated_step_s"] or 0.0 for row in rows], default=0.0) * most or 1.0
    memory = Scale(0.0, available * 1.04, _LABELS, memory_end)
    time = Scale(0.0, slowest * 1.04, memory_end + _GAP, _WIDTH - _MARGIN)
    where = result["topology"] if result["slices"] == 1 else f"{result['slices']} x {result['topology']}"
    parts = [
        element("style", _STYLE),
        element("rect", x=0, y=0, width=_WIDTH, height=height, class_="page"),
        text(12, 22, f"{result['experiment']} on {where}, {result['devices']} devices", class_="head"),
        text(12, 42, _common(rows), class_="soft"),
        text(_LABELS, 66, "peak memory of a device, GiB (dark: arguments)", class_="soft"),
        text(memory_end + _GAP, 66, f"estimated step, s (bar: {least} to {most} times that)", class_="soft"),
        *_axis(memory, bottom),
        *_axis(time, bottom),
        element("path", d=f"M{memory(available):.1f} {_TOP - 6}V{bottom}", class_="limit"),
        text(memory(available) - 5, bottom + 33, f"there are {available:.1f}", text_anchor="end", class_="no"),
    ]
    for index, row in enumerate(rows):
        parts += _line(row, _TOP + _ROW * index + _ROW / 2, memory, time, _label(row, rows), (least, most))
    drawn = picture(_WIDTH, height, f"memory and estimated step of {result['experiment']}", "".join(parts))
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def _line(
    row: dict[str, Any], y: float, memory: Scale, time: Scale, label: str, error: tuple[float, float]
) -> list[str]:
    parts = [text(_LABELS - 12, y + 4, label, text_anchor="end")]
    if not row["fits"]:
        needed = "" if row["needed"] is None else f": {row['needed'] / _GIB:.1f} GiB"
        return [*parts, text(_LABELS + 6, y + 4, f"does not fit{needed}", class_="no")]
    peak, held = (row[name] / _GIB for name in ("needed", "arguments"))
    bar = {"x": memory(0.0), "y": y - _BAR / 2, "height": _BAR}
    parts.append(element("rect", **bar, width=memory(peak) - memory(0.0), class_="more"))
    parts.append(element("rect", **bar, width=memory(min(held, peak)) - memory(0.0), class_="held"))
    parts.append(text(memory(peak) + 5, y + 4, f"{peak:.1f}", class_="soft"))
    step = row["estimated_step_s"]
    low, high = (time(step * factor) for factor in error)
    ends = f"M{low:.1f} {y:.1f}H{high:.1f}M{low:.1f} {y - 5:.1f}v10M{high:.1f} {y - 5:.1f}v10"
    parts.append(element("path", d=ends, class_="range"))
    parts.append(element("circle", cx=time(step), cy=y, r=4.5, class_="held"))
    parts.append(text(time(step), y - 8, f"{step:.3g}", text_anchor="middle", class_="soft"))
    return parts


def _axis(scale: Scale, bottom: float) -> list[str]:
    parts = []
    for tick in nice_ticks(scale.lo, scale.hi, 5):
        at = scale(tick)
        parts.append(element("path", d=f"M{at:.1f} {_TOP - 6}V{bottom}", class_="grid"))
        parts.append(text(at, bottom + 17, number_label(tick), text_anchor="middle", class_="soft"))
    return parts


def _label(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the mesh, and what else differs between candidates."""
    parts = [described(row["mesh"])]
    parts += [row["remat"]] if len({one["remat"] for one in rows}) > 1 else []
    parts += [f"{row['microbatches']} mb"] if len({one["microbatches"] for one in rows}) > 1 else []
    return ", ".join(parts)


def _common(rows: list[dict[str, Any]]) -> str:
    remats, counts = ({row[name] for row in rows} for name in ("remat", "microbatches"))
    parts = [f"remat {remats.pop()}"] if len(remats) == 1 else []
    if len(counts) == 1:
        count = counts.pop()
        parts.append(f"{count} microbatch{'es' if count > 1 else ''}")
    else:
        parts.append("mb: microbatches")
    return ", ".join(parts) + "; by the TPU compiler, not measured"
