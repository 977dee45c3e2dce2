"""The result of a run: the first card of the page, in one number, and its scores before and after RL."""

import math
from html import escape

from tools.report import svg
from tools.report.charts import HALF, figure
from tools.report.load import Row, Run, mapping, number
from tools.report.words import (
    alarms,
    bounds_of,
    duration,
    interval,
    lost_seconds,
    mean_max,
    percent,
    plain,
    points,
    score_keys,
    scores,
    throughput,
)


def headline(run: Run) -> str:
    """Return the first card: scores before and after RL, or the progress so far."""
    first, last = number(run.before.get("pass@1")), number(run.after.get("pass@1"))
    if first is None or last is None:
        return f'<div class="card hero">{_under_way(run, first)}{_tiles(run)}</div>'
    change = points(first, last)
    problems = plain(run.after.get("problems"))
    families = len(mapping(run.after.get("families")))
    what = f"pass@1 on {problems} held-out problems, mean of {families} task families"
    return (
        f'<div class="card hero"><p class="what">{what}</p><div class="score">'
        f'<div class="n was">{percent(first)}<small>%</small></div><div class="n arrow">→</div>'
        f'<div class="n">{percent(last)}<small>%</small></div>'
        f'<div class="delta{" down" if last < first else ""}">{change} points</div></div>'
        f'<p class="what">Before RL {percent(first)}&nbsp;% (95&nbsp;% CI '
        f"{interval(run.before.get('pass@1_ci'))}), after RL {percent(last)}&nbsp;% "
        f"({interval(run.after.get('pass@1_ci'))}).{_verdict(run)}</p>{_tiles(run)}</div>"
    )


def _verdict(run: Run) -> str:
    """Return the conclusion that the two intervals allow, so that noise is not taken for a gain."""
    low_before, high_before = bounds_of(run.before.get("pass@1_ci"))
    low_after, high_after = bounds_of(run.after.get("pass@1_ci"))
    if low_before is None or high_before is None or low_after is None or high_after is None:
        return ""
    if low_after > high_before:
        return " The two 95&nbsp;% intervals do not overlap."
    if high_after < low_before:
        return " The two 95&nbsp;% intervals do not overlap: RL made it worse."
    return " The two 95&nbsp;% intervals overlap: this run alone does not show a change."


def _under_way(run: Run, first: float | None) -> str:
    rewards = run.series("rl", "reward")
    if rewards:
        recent = [value for _, value in rewards[-20:]]
        return (
            '<p class="what">No final evaluation yet. Reward, mean of the last '
            f"{len(recent)} RL steps</p>"
            f'<div class="score"><div class="n">{sum(recent) / len(recent):.3f}</div>'
            f'<div class="delta">RL step {rewards[-1][0]:.0f}</div></div>'
            + ("" if first is None else f'<p class="what">pass@1 before RL: {percent(first)} %</p>')
        )
    rows = run.rows("sft")
    at = f"SFT step {rows[-1]['step']}" if rows else "nothing logged so far"
    return f'<p class="what">No evaluation yet</p><div class="score"><div class="n">{escape(at)}</div></div>'


def _tiles(run: Run) -> str:
    tiles = []
    for key in score_keys(run)[1:]:
        first, last = run.before.get(key), run.after.get(key)
        tiles.append((key, f"{percent(first)} → {percent(last)} %", f"{points(first, last)} points"))
    tiles += [(name, value, "") for name, value in throughput(run)[:2]]
    mean, high = mean_max(run, "staleness")
    if mean is not None:
        tiles.append(("Staleness of samples", f"{plain(mean)} versions", f"at most {plain(high)}"))
    mean, high = mean_max(run, "logprob_diff")
    if mean is not None:
        tiles.append(("Trainer vs sampler", plain(mean), f"log-prob difference, at most {plain(high)}"))
    tiles += [(f"Alarm: {name}", value, "") for name, value in alarms(run)]
    if run.kills:
        lost = lost_seconds(run)
        count = f"{len(run.kills)} role{'s' * (len(run.kills) > 1)} killed"
        names = ", ".join(sorted({str(kill.get("target")) for kill in run.kills}))
        tiles.append(
            (
                count,
                names if lost is None else f"{duration(lost)} lost",
                "" if lost is None else names,
            )
        )
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in tiles
    )
    style = f"--columns: {columns(len(tiles))}"
    return f'<dl class="tiles" style="{style}">{cells}</dl>' if cells else ""


def columns(tiles: int) -> int:
    """Return how many tiles stand side by side, six at most: in rows as equal as can be, so none stands alone."""
    side_by_side = math.ceil(tiles / max(1, math.ceil(tiles / 6)))
    while side_by_side > 2 and tiles % side_by_side == 1:
        side_by_side -= 1
    return side_by_side


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
