"""Results of a run: metrics, samples, policy, report."""

import dataclasses
from html import escape
from pathlib import Path
from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from rl.serving.policy import newest_weights, policy_config
from rl.training.warm_start import warm_start_directory
from tools.report.load import policy_folders
from tools.run.plots import Html
from tools.run.policy import Policy, load_policy

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run directory, as a script or notebook looks at it; `FinishedRun(path)` opens one of another day.

    Attributes:
        path: path of the directory; `axl rl` and `axl train` go on with it as well.
        finished: False if the run was interrupted.
        config: config that ran; None: as the directory records it.
    """

    path: Path
    finished: bool = True
    config: ConfigBase[Any] | None = None

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
