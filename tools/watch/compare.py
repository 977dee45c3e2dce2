"""Runs side by side: first, last and best values of their figures with a curve of each, and where configs differ."""

import re
from collections.abc import Iterator, Sequence
from html import escape

from axlearn_like.config import differences, recorded_lines
from axlearn_like.run.progress import one_line
from tools.report.cards import Sheet
from tools.report.charts import FULL, Curve, curves
from tools.report.html import page
from tools.report.load import Points, Run, number
from tools.report.words import MISSING, plain
from tools.watch.frame import recent, spark
from tools.watch.standing import standing

MOST = 10  # runs
_DEFAULT = ("rl/reward", "evaluation/pass@1", "sft/loss", "sft/eval_loss", "rl/entropy")
_LOWER = re.compile(r"loss|perplexity|error|kl|_diff")  # figures of which less is better


class Compared:
    """Runs with names that tell them apart, and their figures PHASE/METRIC."""

    def __init__(self, runs: Sequence[Run]):
        """Name runs by the last parts of their paths, as many as tell them apart."""
        parts = [run.path.resolve().parts for run in runs]
        depth = next((n for n in range(1, 99) if len({own[-n:] for own in parts}) == len(runs)), 99)
        self.runs = {one_line("/".join(own[-depth:]), 80): run for own, run in zip(parts, runs, strict=True)}

    def figures(self, wanted: Sequence[str] = ()) -> list[str]:
        """Return the figures that a run has: of those wanted, or of the usual ones."""
        return [figure for figure in wanted or _DEFAULT if any(series(run, figure) for run in self.runs.values())]

    def known(self) -> set[str]:
        """Return all figures of all runs."""
        rows = [row for run in self.runs.values() for row in run.metrics]
        return {f"{row.get('phase')}/{key}" for row in rows for key in row} | {"evaluation/pass@1"}

    def sheets(self, figures: Sequence[str]) -> Iterator[Sheet]:
        """Yield how the runs stand, a table for each figure, and the differences of configs."""
        stand = [(name, standing(run)) for name, run in self.runs.items()]
        rows = [(name, found.words, found.phase, found.progress or MISSING) for name, found in stand]
        yield Sheet("runs", ("run", "state", "phase", "step"), rows)
        for figure in figures:
            rows = [(name, *_ends(figure, series(run, figure))) for name, run in self.runs.items()]
            yield Sheet(figure, ("run", "first", "last", "best", "at step", "curve"), rows)
        yield Sheet("where the configs differ", ("config", *self.runs), list(self._differences()))

    def page(self, figures: Sequence[str]) -> str:
        """Return the page of the same, with a chart for each figure."""
        body, first = "", next(iter(self.runs.values()))
        for sheet in self.sheets(figures):
            if sheet.title in figures:
                found = ((name, series(run, sheet.title)) for name, run in self.runs.items())
                drawn = [Curve(name, values, f"c{n % 8 + 1}") for n, (name, values) in enumerate(found)]
                says = "Dots are single rows, lines moving means."
                body += curves(first, sheet.title, says, drawn, y_label=sheet.title, size=FULL, events=False)
            body += sheet.card()
        notes = [f"<p>{escape(f'{name}: {note}')}</p>" for name, run in self.runs.items() for note in run.notes]
        return page(", ".join(self.runs), "comparison of runs", "", f"{body}<footer>{''.join(notes)}</footer>")

    def _differences(self) -> Iterator[tuple[str, ...]]:
        """Yield path and values of the lines that are not the same in all configs.

        Fields that only some runs have are left out below an object that differs itself.
        """
        found = differences(*(recorded_lines(run.config) for run in self.runs.values()))
        for path, values in found.items():
            above = {path[: dot.start()] for dot in re.finditer(r"[.\[]", path)}
            if None not in values or not above & found.keys():
                yield path or "(root)", *(MISSING if value is None else value for value in values)


def series(run: Run, figure: str) -> Points:
    """Return a figure PHASE/METRIC of a run by steps; of phase `evaluation` what the event log has."""
    phase, _, name = figure.partition("/")
    if phase != "evaluation":
        return run.series(phase, name)
    rows = ((number(r.get("version")), number(r.get(name))) for r in run.events if r.get("event") == "evaluated")
    return sorted({step: value for step, value in rows if step is not None and value is not None}.items())


def _ends(figure: str, values: Points) -> tuple[str, ...]:
    """Return first, last (a mean of the last ones) and best value, the step of the best, and a curve."""
    if not values:
        return (MISSING,) * 5
    step, best = (min if _LOWER.search(figure) else max)(values, key=lambda point: point[1])
    last = values[-1][1] if figure.startswith("evaluation/") else recent(values)
    return plain(values[0][1]), plain(last), plain(best), plain(step), spark(values)
