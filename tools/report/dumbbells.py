"""Task scores before and after RL, with their confidence intervals."""

from __future__ import annotations

from tools.report import svg
from tools.report.charts import HALF, figure
from tools.report.load import Row, Run, number
from tools.report.words import bounds_of, percent, points, scores


def dumbbells(run: Run, key: str) -> str:
    """Return the card of scores before and after with confidence intervals: the mean, then one row per family."""
    rows = [row for row in scores(run, key) if number(row[1].get(key)) is not None or row[2].get(key) is not None]
    if not rows:
        return ""

    pitch, top = 54, 8
    height = top + pitch * len(rows) + 30
    scale = svg.Scale(0.0, 1.0, 8, HALF - 14)
    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        column, anchor = scale(tick), {0.0: "start", 1.0: "end"}.get(tick, "middle")
        parts.append(svg.element("path", d=f"M{column:.1f} {top + 20}V{height - 26}", class_="grid"))
        parts.append(svg.text(column, height - 8, f"{100 * tick:.0f} %", text_anchor=anchor, class_="tick"))
    for index, row in enumerate(rows):
        parts.append(_dumbbell(scale, top + pitch * index, key, row, strong=index == 0))
    picture = svg.picture(HALF, height, f"{key} before and after RL", "".join(parts))
    kind, _, k = key.partition("@")
    if key == "pass@1":
        caption = "Bars are 95 % confidence intervals over the held-out problems. Good: every dot moves right, "
        caption += "and further than its bar is long."
    elif kind == "pass":
        caption = f"Solved by at least one of {k} samples. Good: not lower than before, so RL has not bought pass@1 "
        caption += "with variety."
    else:
        caption = f"The most frequent of {k} answers is right. Above pass@1, right answers agree more than wrong ones."
    legend = [("before RL", "dot hollow muted"), ("after RL", "dot fill accent")]
    return figure(f"{key}, held-out problems", caption, picture, legend)


def _dumbbell(scale: svg.Scale, top: float, key: str, row: tuple[str, Row, Row], *, strong: bool) -> str:
    """Return the markup of one row: name, scores before and after, and the change."""
    name, before, after = row
    style = "name strong" if strong else "name"
    change = points(before.get(key), after.get(key))
    values = f"{percent(before.get(key))} → {percent(after.get(key))}"
    parts = [
        svg.text(2, top + 13, name, class_=style),
        svg.text(HALF - 52, top + 13, values, text_anchor="end", class_="value"),
        svg.text(HALF - 2, top + 13, change, text_anchor="end", class_="name strong"),
    ]
    middle = top + 33
    first, last = number(before.get(key)), number(after.get(key))
    if first is not None and last is not None:
        path = f"M{scale(first):.1f} {middle + 6}L{scale(last):.1f} {middle - 6}"
        parts.append(svg.element("path", d=path, class_="join"))
    for when, scores_of, value, row_y, color, mark in (
        ("before", before, first, middle + 6, "muted", "hollow"),
        ("after", after, last, middle - 6, "accent", "fill"),
    ):
        if value is None:
            continue
        low, high = bounds_of(scores_of.get(f"{key}_ci"))
        tip = f"{name}, {when}: {percent(value)} %"
        drawn = ""
        if low is not None and high is not None:
            tip += f", 95 % CI {percent(low)} to {percent(high)} %"
            drawn = svg.element("path", d=f"M{scale(low):.1f} {row_y}H{scale(high):.1f}", class_=f"whisk {color}")
        dot = svg.element("circle", cx=scale(value), cy=row_y, r=5, class_=f"{mark} {color}")
        parts.append(svg.element("g", svg.title(tip) + drawn + dot))
    return "".join(parts)
