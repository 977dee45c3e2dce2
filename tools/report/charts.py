"""Curves over the steps of a run, and the card of a figure."""

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tools.report import svg
from tools.report.load import Points, Run, number
from tools.report.words import duration, plain

FULL, HALF, MINI = 1046, 504, 300
_MOST_POINTS, _MOST_COLUMNS = 400, 150


@dataclass(frozen=True)
class Curve:
    """One series over steps.

    ``raw`` shows the points under a smoothed line; ``worst`` thins by maximum instead of mean.
    """

    label: str
    values: Points
    style: str = "c1"
    raw: bool = True
    worst: bool = False


@dataclass(frozen=True)
class Mark:
    """A vertical line at a step."""

    step: float
    style: str
    tip: str
    words: str


def marks(run: Run) -> list[Mark]:
    """Return kills and replacements by RL step, from the event log or, without one, the report."""
    found = []
    for outage in run.outages:
        step = run.step_at(outage.killed)
        if step is not None:
            since = duration(outage.killed - run.start)
            tip = f"{outage.target} killed at step {step:.0f}, {since} after the start"
            found.append(Mark(step, "kill", tip, f"{outage.target} killed"))
        back = run.step_at(outage.back) if outage.back is not None else None
        if back is not None and outage.back is not None:
            since = duration(outage.back - outage.killed)
            tip = f"{outage.target} back at step {back:.0f}, {since} after the kill"
            found.append(Mark(back, "back", tip, "back"))
    if not found:
        steps = [(kill, number(kill.get("step"))) for kill in run.kills]
        found = [
            Mark(step, "kill", f"{kill.get('target')} killed at step {step:.0f}", f"{kill.get('target')} killed")
            for kill, step in steps
            if step is not None
        ]
    return found


def thin(values: Points, most: int, worst: bool = False) -> Points:
    """Thin to at most ``most`` points: neighbours become their mean, or their maximum if ``worst``."""
    size = -(-len(values) // most)
    if size <= 1:
        return values
    chunks = [values[at : at + size] for at in range(0, len(values), size)]
    middle = [sum(x for x, _ in chunk) / len(chunk) for chunk in chunks]
    if worst:
        return [(x, max(y for _, y in chunk)) for x, chunk in zip(middle, chunks, strict=True)]
    return [(x, sum(y for _, y in chunk) / len(chunk)) for x, chunk in zip(middle, chunks, strict=True)]


def window(count: int) -> int:
    """Return the odd width of the moving mean for this number of points; 1 for few points."""
    return max(5, count // 16) | 1 if count >= 12 else 1


def moving_mean(values: Points, width: int) -> Points:
    """Return the centred mean over ``width`` neighbours, fewer at the ends: no lag behind an event."""
    half, sums = width // 2, [0.0]
    for _, y in values:
        sums.append(sums[-1] + y)
    smooth = []
    for index, (x, _) in enumerate(values):
        low, high = max(0, index - half), min(len(values), index + half + 1)
        smooth.append((x, (sums[high] - sums[low]) / (high - low)))
    return smooth


def figure(heading: str, caption: str, picture: str, key: Iterable[tuple[str, str]] = ()) -> str:
    """Return a card with a heading, a legend of (label, style), a picture, which scrolls on a phone, and a caption."""
    items = "".join(f"<li>{_swatch(style)}{html.escape(label)}</li>" for label, style in key)
    listed = f'<ul class="key">{items}</ul>' if items else ""
    return (
        f'<figure class="card plot"><div class="head"><h3>{html.escape(heading)}</h3>{listed}</div>'
        f'<div class="wide">{picture}</div><figcaption>{html.escape(caption).replace(" %", "&nbsp;%")}</figcaption>'
        "</figure>"
    )


def _swatch(style: str) -> str:
    if style.startswith("box "):
        body = svg.element("rect", x=2, y=0, width=14, height=10, rx=2, class_=f"fill {style[4:]}")
    elif style.startswith("dot "):
        body = svg.element("circle", cx=9, cy=5, r=4, class_=style[4:])
    else:
        body = svg.element("path", d="M1 5H17", class_=f"line {style}")
    return svg.element("svg", body, viewBox="0 0 18 10", aria_hidden="true")


@dataclass(frozen=True)
class Axis:
    """The vertical axis of a plot."""

    label: str  # name and unit
    log: bool = False  # logarithmic; zeros are drawn on the floor
    # Fixed limits; else from the data, and from zero unless ``log`` or there is a ``reference``
    y: tuple[float, float] | None = None
    y_format: Callable[[float], str] = svg.number_label  # labels of ticks
    reference: float | None = None  # the ideal value, drawn as a thin line


def curves(
    run: Run,
    heading: str,
    caption: str,
    series: Sequence[Curve],
    *,
    y_label: str,
    size: int = HALF,
    events: bool = True,
    **options: Any,
) -> str:
    """Return a card with curves over steps, or an empty string if no series has a value.

    Args:
        run: The run, for its kills.
        caption: A description of the curves, and how good ones look.
        y_label: Name and unit of the vertical axis.
        size: ``FULL`` or ``HALF``.
        events: Whether to mark kills and restarts.
        options: Other fields of ``Axis``.
    """
    drawn = [curve for curve in series if curve.values]
    if not drawn:
        return ""
    axis = Axis(y_label, **options)
    key = [(curve.label, curve.style) for curve in drawn] if len(drawn) > 1 else []
    name = f"{heading}: {drawn[0].values[0][1]:.3g} first, {drawn[0].values[-1][1]:.3g} last"
    plot = _curve_plot(drawn, size, 330 if size == FULL else 250, name, axis)
    _draw_marks(plot, marks(run) if events else [], words=size == FULL)
    plot.hover(_tips(drawn, axis.y_format if axis.y_format is svg.percent_label else plain))
    return figure(heading, caption, plot.render(), key)


def _curve_plot(series: Sequence[Curve], width: int, height: int, name: str, axis: Axis) -> svg.Plot:
    smooth = [moving_mean(curve.values, window(len(curve.values))) if curve.raw else [] for curve in series]
    steps = [x for curve in series for x, _ in curve.values]
    values = [value for curve in series for _, value in curve.values]
    if axis.reference is not None:
        values.append(axis.reference)
    span = axis.y or svg.limits(values, zero=not axis.log and axis.reference is None, log=axis.log)
    where, labels = (min(steps), max(steps)), ("step", axis.label)
    plot = svg.Plot(width, height, where, span, name=name, labels=labels, log=axis.log, y_format=axis.y_format)
    if axis.reference is not None:
        plot.add(svg.element("path", d=f"M{plot.left} {plot.y(axis.reference):.1f}H{plot.right}", class_="axis dash"))
    for curve, line in zip(series, smooth, strict=True):
        if curve.raw:
            plot.dots(thin(curve.values, _MOST_POINTS, curve.worst), f"{curve.style} soft")
            plot.line(thin(line, _MOST_POINTS), curve.style)
        else:
            plot.line(thin(curve.values, _MOST_POINTS, curve.worst), curve.style)
    return plot


def _draw_marks(plot: svg.Plot, ruled: Sequence[Mark], words: bool) -> None:
    for mark in ruled:
        # The kill's label is left of its line and the return's label right of its own: the two are
        # often a step apart.
        before = mark.style == "kill" and plot.x(mark.step) > plot.left + 110
        shown = mark.words if words and (before or mark.style != "kill") else ""
        if words and mark.style == "kill" and not before:
            shown = "\N{MULTIPLICATION X}"
        plot.rule(mark.step, mark.style, mark.tip, shown, before)


def _tips(series: Sequence[Curve], form: Callable[[float], str]) -> list[tuple[float, str]]:
    longest = max(series, key=lambda curve: len(curve.values))
    columns = thin(longest.values, _MOST_COLUMNS)
    others = [thin(curve.values, _MOST_COLUMNS, curve.worst) for curve in series]
    tips = []
    for index, (step, _) in enumerate(columns):
        lines = [f"step {step:.0f}"]
        for curve, values in zip(series, others, strict=True):
            near = values[index] if len(values) == len(columns) else min(values, key=lambda v: abs(v[0] - step))
            lines.append(f"{curve.label}: {form(near[1])}")
        tips.append((step, "\n".join(lines)))
    return tips


def small_multiples(run: Run) -> str:
    """Return one small reward plot per family on common axes; empty without family rewards."""
    return _minis(run, [(family, run.series("rl", f"reward/{family}"), (0.0, 1.0)) for family in run.families])


def term_multiples(run: Run) -> str:
    """Return one small plot per term of the reward, each on axes of its own; empty if the reward has no terms."""
    names = dict.fromkeys(key[12:] for row in run.rows("rl") for key in row if key.startswith("reward_term/"))
    every = [(name, run.series("rl", f"reward_term/{name}")) for name in names]
    return _minis(run, [(name, values, svg.limits([value for _, value in values])) for name, values in every])


def episode_multiples(run: Run) -> str:
    """Return one small plot per figure of episodes in environments; empty without any."""
    every = dict.fromkeys(key for row in run.rows("rl") for key in row if key.startswith("episode/"))
    timed = dict.fromkeys(key for row in run.rows("rl") for key in row if key == "time/tool_seconds")
    series = [(key.partition("/")[2].replace("_", " "), run.series("rl", key)) for key in (*every, *timed)]
    plots = [(name, values, svg.limits([value for _, value in values], zero=True)) for name, values in series]
    return _minis(run, plots, "an episode")


def _minis(run: Run, series: list[tuple[str, Points, tuple[float, float]]], what: str = "reward") -> str:
    cards = []
    ruled = marks(run)
    for title, values, limits in series:
        if values:
            curve = Curve(title, values, "accent")
            ends = moving_mean(values, window(len(values)))
            name = f"{what.capitalize()} of {title}: {ends[0][1]:.2f} at first, {ends[-1][1]:.2f} at last"
            plot = _curve_plot([curve], MINI, 168, name, Axis(what, y=limits))
            _draw_marks(plot, [replace(mark, words="") for mark in ruled], words=False)
            plot.hover(_tips([curve], plain))
            cards.append(
                f'<figure class="card plot"><div class="head"><h3>{html.escape(title)}</h3>'
                f'<span class="meta">{ends[0][1]:.2f} → {ends[-1][1]:.2f}</span></div>'
                f"{plot.render()}</figure>"
            )
    return f'<div class="minis">{"".join(cards)}</div>' if cards else ""
