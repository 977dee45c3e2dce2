"""Runs side by side: first, last and best values of their figures with a curve of each, and where configs differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text

from axlearn_like.config import differences, recorded_lines
from axlearn_like.run.progress import one_line
from tools.report.cards import table as html_table
from tools.report.cards import table_card
from tools.report.charts import FULL, Curve, curves
from tools.report.html import page
from tools.report.load import Points, Run, number
from tools.report.words import MISSING, plain
from tools.watch.frame import recent, spark
from tools.watch.standing import standing

MOST = 10  # runs
_DEFAULT = ("rl/reward", "evaluation/pass@1", "sft/loss", "sft/eval_loss", "rl/entropy")
_LOWER = re.compile(r"loss|perplexity|error|kl|_diff")  # figures of which less is better
_WIDE = 60  # characters of a value in the terminal


@dataclass(frozen=True)
class Compared:
    """Runs with names that tell them apart."""

    runs: dict[str, Run]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Compared:
        """Name runs by the last parts of their paths, as many as tell them apart."""
        parts = [run.path.resolve().parts for run in runs]
        depth = next((n for n in range(1, 99) if len({own[-n:] for own in parts}) == len(runs)), 99)
        return cls({one_line("/".join(own[-depth:]), 80): run for own, run in zip(parts, runs, strict=True)})

    def figures(self, wanted: Sequence[str] = ()) -> list[str]:
        """Return the names PHASE/METRIC of figures that a run has: those wanted, or the usual ones."""
        return [name for name in wanted or _DEFAULT if any(series(run, name) for run in self.runs.values())]

    def known(self) -> list[str]:
        """Return the names of all figures of all runs."""
        rows = [row for run in self.runs.values() for row in run.metrics]
        names = {f"{row.get('phase')}/{key}" for row in rows for key in row if number(row[key]) is not None}
        return sorted(names | {"evaluation/pass@1"})

    def differences(self) -> Iterator[tuple[str, ...]]:
        """Yield path and a value for each run of the lines of the configs that are not the same in all.

        Fields that only some runs have are left out below an object that differs itself.
        """
        found = differences(*(recorded_lines(run.config) for run in self.runs.values()))
        for path, values in found.items():
            above = {path[: dot.start()] for dot in re.finditer(r"[.\[]", path)}
            if None not in values or not above & found.keys():
                yield path or "(root)", *(MISSING if value is None else value for value in values)

    def tables(self, names: Sequence[str]) -> Iterator[Table]:
        """Yield the terminal's tables: how the runs stand, a table for each figure, differences of configs."""
        stand = Table("run", "state", "phase", "step", title="runs", **_PLAIN)
        for name, run in self.runs.items():
            stands = standing(run)
            stand.add_row(*map(Text, (name, stands.words, stands.phase, stands.progress or MISSING)))
        yield stand
        for figure in names:
            shown = Table("run", "first", "last", "best", "at step", "curve", title=figure, **_PLAIN)
            for name, run in self.runs.items():
                shown.add_row(*map(Text, (name, *ends(figure, values := series(run, figure)), spark(values))))
            yield shown
        differ = Table(title="where the configs differ", **_PLAIN)
        for name in ("config", *self.runs):
            differ.add_column(Text(name), overflow="fold")
        for cells in self.differences():
            differ.add_row(*(Text(one_line(cell, _WIDE)) for cell in cells))
        if differ.row_count:
            yield differ

    def page(self, names: Sequence[str]) -> str:
        """Return the page of the same, with a chart for each figure."""
        any_run, heads = next(iter(self.runs.values())), [escape(name) for name in self.runs]
        stands = [(standing(run), name) for name, run in self.runs.items()]
        rows = [[escape(c) for c in (name, one.words, one.phase, one.progress or MISSING)] for one, name in stands]
        body = table_card("Runs", html_table(("run", "state", "phase", "step"), rows))
        for figure in names:
            found = {name: series(run, figure) for name, run in self.runs.items()}
            drawn = [Curve(name, values, f"c{n % 8 + 1}") for n, (name, values) in enumerate(found.items())]
            options = {"y_label": figure.partition("/")[2], "size": FULL, "events": False}
            body += curves(any_run, figure, "Dots are single rows, lines moving means.", drawn, **options)
            rows = [[escape(cell) for cell in (name, *ends(figure, values))] for name, values in found.items()]
            body += table_card(figure, html_table(("run", "first", "last", "best", "at step"), rows, range(1, 5)))
        rows = [[escape(cell) for cell in cells] for cells in self.differences()]
        body += table_card("Where the configs differ", html_table(("path", *heads), rows))
        notes = {f"{name}: {note}" for name, run in self.runs.items() for note in run.notes}
        below = "".join(f"<p>{escape(note)}</p>" for note in sorted(notes))
        return page(", ".join(self.runs), "comparison of runs", "", f"{body}<footer>{below}</footer>")


_PLAIN: dict[str, Any] = {"box": None, "pad_edge": False, "title_justify": "left"}


def series(run: Run, figure: str) -> Points:
    """Return a figure PHASE/METRIC of a run by steps; of phase `evaluation` what the event log has."""
    phase, _, name = figure.partition("/")
    if phase != "evaluation":
        return run.series(phase, name)
    rows = ((number(r.get("version")), number(r.get(name))) for r in run.events if r.get("event") == "evaluated")
    return sorted({step: value for step, value in rows if step is not None and value is not None}.items())


def ends(figure: str, values: Points) -> tuple[str, str, str, str]:
    """Return first, last (a mean of the last ones) and best value, and the step of the best; dashes without any."""
    if not values:
        return MISSING, MISSING, MISSING, MISSING
    best: Callable[..., tuple[float, float]] = min if _LOWER.search(figure) else max
    step, value = best(values, key=lambda point: point[1])
    last = values[-1][1] if figure.startswith("evaluation/") else recent(values)
    return plain(values[0][1]), plain(last), plain(value), plain(step)
