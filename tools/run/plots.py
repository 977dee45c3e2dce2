"""Plots of a run in a notebook's cell, while it goes on and afterwards."""

import base64
import io
import time
from collections.abc import Callable, Sequence
from typing import Any


class Html(str):
    """Markup, which a notebook shows as such."""

    def _repr_html_(self) -> str:
        return str(self)


def live_plot(*names: str, phase: str | None = None, every: float = 1.0) -> Callable[[dict[str, Any]], None]:
    """Return an `on_step` of `run` that plots figures against updates in the cell while the run goes on.

    Args:
        names: names of metrics, a curve each.
        phase: sft or rl; None: both.
        every: seconds between two pictures.
    """
    rows: list[dict[str, Any]] = []
    last = 0.0
    shown: Any = None

    def plot(row: dict[str, Any]) -> None:
        nonlocal last, shown
        if phase not in (None, row.get("phase")) or not any(name in row for name in names):
            return
        rows.append(row)
        if time.monotonic() - last < every:
            return
        last = time.monotonic()
        picture = plot_rows(rows, names)
        try:
            from IPython.display import display  # pyright: ignore[reportMissingImports]
        except ImportError:
            return
        if shown is None:
            shown = display(picture, display_id=True)
        else:
            shown.update(picture)

    return plot


def plot_rows(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Html:
    """Return a plot of these figures as a picture in markup."""
    from matplotlib.figure import Figure  # no global state, no window

    figure = Figure(figsize=(4.2 * len(names), 2.6), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axis.plot([step for step, _ in points], [value for _, value in points])
        axis.set_xlabel("update")
        axis.set_title(name)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80)
    return Html(f'<img src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"/>')
