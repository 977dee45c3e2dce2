"""The first card of the page: the result in one number, or the progress of a run under way."""

from __future__ import annotations

import math
from html import escape

from tools.report.load import Run, mapping, number
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
