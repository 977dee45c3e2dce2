"""Results of a run: metrics, samples, policy, report."""

import base64
import dataclasses
import io
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from rl.serving.policy import newest_weights, policy_config
from rl.training.warm_start import warm_start_directory
from tools.report.load import policy_folders
from tools.run.policy import Policy, load_policy


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


Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run directory, as a script or notebook looks at it; `FinishedRun(path)` opens one of another day."""

    path: Path  # path of the directory; `axl rl` and `axl train` go on with it as well
    finished: bool = True  # False if the run was interrupted
    config: ConfigBase[Any] | None = None  # config that ran; None: as the directory records it

    @property
    def policies(self) -> dict[str, "FinishedRun"]:
        """The runs of its policies by name, where it trains several."""
        return {path.name: FinishedRun(path) for path in policy_folders(self.path)}

    @property
    def metrics(self) -> list[Row]:
        """A row for each update of all phases, for `pandas.DataFrame(...)`."""
        rows = [Path(warm_start_directory(RunDirectory.attach(self.path))) / "metrics.jsonl"]
        found = [path for path in (*rows, self.path / "metrics.jsonl") if path.exists()]
        return [row for path in found for row in read_rows(path)]

    @property
    def samples(self) -> list[Row]:
        """Questions and answers that the run has kept for people to read, a row for each."""
        found = sorted((self.path / "rollouts").glob("*.jsonl"))
        return [row for path in found for row in read_rows(path)]

    def series(self, name: str, phase: str | None = None) -> list[float]:
        """Return one figure of all updates that have it; `phase`: sft or rl."""
        return [row[name] for row in self.metrics if name in row and phase in (None, row.get("phase"))]

    def policy(self) -> Policy:
        """Return the policy with its newest weights; `load_policy("RUN@best")` returns others.

        Raises:
            UserError: the run has no weights yet, or what it trained draws no words.
        """
        if self.config is None:
            return load_policy(self.path)
        run = RunDirectory.attach(self.path)
        return Policy(policy_config(self.config, self.path), newest_weights(run))

    def compare(self, count: int = 6) -> Html:
        """Return a table of the same questions before and after RL, the first in the file."""
        answers: dict[str, dict[str, Row]] = {}
        for row in self.samples:
            if row.get("phase") in ("eval_before", "eval_after") and row.get("question") is not None:
                answers.setdefault(row["question"], {}).setdefault(row["phase"], row)
        both = [(question, found) for question, found in answers.items() if len(found) == 2][:count]
        lines = [
            "".join(f"<td>{escape(str(cell))}</td>" for cell in (question, *map(_answer, found.values())))
            for question, found in both
        ]
        head = "<tr><th>question</th><th>before</th><th>after</th></tr>"
        return Html(f"<table>{head}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>")

    def report(self, height: int = 800) -> Html:
        """Write the report of the run, and return it as a frame for a cell."""
        from tools.report import write_report

        page = write_report(self.path).read_text(encoding="utf-8", errors="replace")
        return Html(f'<iframe srcdoc="{escape(page)}" style="width:100%;height:{height}px;border:0"></iframe>')


def _answer(row: Row) -> str:
    mark = {True: "right: ", False: "wrong: "}.get(row.get("reward", 0) >= 1.0)
    return f"{mark}{row.get('answer', row.get('completion', ''))}"
