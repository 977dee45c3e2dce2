"""The terminal's tables: scores before and after, then speed, staleness, mismatch and kills."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tools.report import goodput
from tools.report.load import Row, Run, left_out, mapping, number
from tools.report.words import (
    alarms,
    duration,
    interval,
    label,
    mean_max,
    percent,
    plain,
    points,
    score_keys,
    scores,
    throughput,
)


def print_tables(run: Run, console: Console | None = None) -> None:
    """Print the tables of a run; parts that are not there yet are left out."""
    out = console or Console()
    for part in tables(run):
        out.print(part)


def tables(run: Run) -> list[RenderableType]:
    """Return the tables of a run, ready for ``rich``; each fits 80 columns."""
    made: dict[str, Callable[[], RenderableType | None]] = {
        "Scores": lambda: score_table(run) if score_keys(run) else Text(_progress(run)),
        "Figures of the run": lambda: run_table(run),
        "Kills": lambda: kill_table(run) if run.kills else None,
        "Goodput": lambda: Text(told) if (told := goodput.told(run)) else None,
    }
    drawn = (left_out(name, make, None, run.notes) for name, make in made.items())
    parts = [part for part in drawn if part is not None]
    parts += [Text(f"note: {note}", style="yellow") for note in run.notes]
    return parts


def _progress(run: Run) -> str:
    logged = [f"{phase.upper()} step {rows[-1]['step']}" for phase in ("sft", "rl") if (rows := run.rows(phase))]
    return f"{run.name}: no evaluation yet; logged so far: {', '.join(logged) or 'nothing'}"


def _score(row: Row, key: str) -> Text:
    ci = interval(row.get(f"{key}_ci"))
    return Text.assemble(percent(row.get(key)), (f"  {ci}" if ci else "", "dim"))


def _change(before: object, after: object) -> Text:
    first, last = number(before), number(after)
    style = "" if first is None or last is None else "green" if last > first else "red" if last < first else ""
    return Text(points(before, after), style=style)


def score_table(run: Run) -> Table:
    """Return the table of pass@k (with 95 % confidence intervals) and maj@k in per cent, the mean first."""
    table = Table(
        title=f"{run.name}: held-out problems solved, % (95 % CI)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("task family", no_wrap=True, min_width=18)
    table.add_column("of", justify="right", no_wrap=True, min_width=3)
    for name in ("before RL", "after RL", "points"):
        table.add_column(name, justify="right", no_wrap=True)
    for key in score_keys(run):
        table.add_section()
        for index, (name, before, after) in enumerate(scores(run, key)):
            first = f"{key}  mean" if index == 0 else f"  {name}"
            table.add_row(
                Text(first),
                plain((after or before).get("problems")),
                _score(before, key),
                _score(after, key),
                _change(before.get(key), after.get(key)),
                style="bold" if index == 0 else "",
            )
    return table


def run_table(run: Run) -> Table:
    """Return the table of speed, staleness, trainer-sampler difference and seconds by phase, as name and value."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("run", overflow="fold")
    table.add_column("value", justify="right")
    for name, value in throughput(run):
        table.add_row(Text(name), value)
    for name, words in (
        ("staleness", "Staleness, versions (mean, max)"),
        ("logprob_diff", "Trainer-sampler log-prob difference (mean, max)"),
        ("scoring_diff", "The same, scored in the sampler's order (mean, max)"),
    ):
        mean, high = mean_max(run, name)
        if mean is not None or high is not None:
            table.add_row(words, f"{plain(mean)}, {plain(high)}")
    for name, value in alarms(run):
        table.add_row(Text(f"Alarm: {name}"), value)
    table.add_section()
    for key, value in {"total": run.report.get("seconds"), **mapping(run.report.get("phase_seconds"))}.items():
        table.add_row(Text(label(key)), duration(value))
    return table


def kill_table(run: Run) -> Table:
    """Return a table with one row per killed role: when, and the seconds to notice, to replace, and lost in all."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("killed")
    for name in ("at RL step", "noticed after", "replaced after", "run lost"):
        table.add_column(name, justify="right")
    for kill in run.kills:
        table.add_row(
            Text(str(kill.get("target"))),
            plain(kill.get("step")),
            duration(kill.get("detected_s")),
            duration(kill.get("replaced_s")),
            duration(kill.get("lost_s")),
        )
    return table
