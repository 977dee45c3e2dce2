"""Runs in notebooks: `run(cfg)` trains or improves a policy in this process, and returns what came out of it.

    from tools.notebook import live_plot, run

    done = run(cfg, on_step=live_plot("reward"))
    pandas.DataFrame(done.metrics)

A cell that is run again resumes, or returns at once if the run is complete. The interrupt button stops after the
current update, and the run can be resumed.
"""

import base64
import contextlib
import dataclasses
import io
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

from axlearn_like.config import ConfigBase, to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.jsonl import JsonlTail
from axlearn_like.run.metrics import read_rows
from mesh.devices import one_device_per_core
from mesh.programs.compilation import enable_compilation_cache
from rl.experiment import RLExperiment, Runtime
from rl.runtime.run import RLRun
from rl.training.warm_start import warm_start_directory
from tools.experiment import check_command, commands_of

Row = dict[str, Any]
OnStep = Callable[[Row], object]


class Html(str):
    """Markup, which a notebook shows as such."""

    def _repr_html_(self) -> str:
        return str(self)


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run directory, as a notebook looks at it.

    Attributes:
        path: path of the directory; `axl rl` and `axl train` go on with it as well.
        finished: False if the run was interrupted.
    """

    path: Path
    finished: bool

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


def run(
    cfg: ConfigBase[Any],
    run_dir: str | Path | None = None,
    *,
    on_step: OnStep | Sequence[OnStep] = (),
    runtime: Runtime = "inprocess",
    quiet: bool = False,
    force: bool = False,
) -> FinishedRun:
    """Run the config of a trainer or of an RL experiment.

    Args:
        cfg: the experiment; it is not changed.
        run_dir: where the run lives; None: a folder in `runs` with the config's digest, so that another config is
            another run.
        on_step: called with each row of metrics, in this thread; of several updates, one after another.
        runtime: runtime of an RL experiment: all roles in this process, or "ray".
        quiet: print nothing.
        force: resume even if the run directory holds another config.

    Raises:
        UserError: the config cannot be run, before anything expensive.
    """
    command = next((one for one in commands_of(cfg) if one in ("rl", "train")), "train")
    check_command(cfg, command, type(cfg).__qualname__)
    path = Path(run_dir).expanduser() if run_dir is not None else _default_path(cfg, command)
    calls = [on_step] if callable(on_step) else list(on_step)
    watch = _Watch(path, calls)
    with contextlib.suppress(RuntimeError):  # an earlier cell has opened the devices
        one_device_per_core()
    enable_compilation_cache()
    if command == "rl":
        say = (lambda line: None) if quiet else lambda line: print(line, file=sys.stdout, flush=True)
        done = RLRun(cast(RLExperiment, cfg.clone().build()), say=say)
        finished = done.run(path, runtime=runtime, force=force, stop=watch.look) is not None
    else:
        trainer: Any = cfg.clone().build()
        finished = bool(trainer.run(path, progress=not quiet, force=force, stop=watch.look)["finished"])
    watch.look()
    return FinishedRun(path.resolve(), finished)


def live_plot(*names: str, phase: str | None = None, every: float = 1.0) -> OnStep:
    """Return an `on_step` that plots figures against updates in the cell while the run goes on.

    Args:
        names: names of metrics, a curve each.
        phase: sft or rl; None: both.
        every: seconds between two pictures.
    """
    rows: list[Row] = []
    last = 0.0
    shown: Any = None

    def plot(row: Row) -> None:
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


def plot_rows(rows: Sequence[Row], names: Sequence[str]) -> Html:
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


class _Watch:
    """Rows of a run's metrics as they come, for callbacks; it stands in for a request to stop, which it never makes."""

    def __init__(self, path: Path, calls: Sequence[OnStep]):
        run = RunDirectory.attach(path)
        inner = RunDirectory.attach(warm_start_directory(run))
        self._calls = calls
        self._tails = [JsonlTail(one.metrics_path, from_end=one.metrics_path.exists()) for one in (inner, run)]

    def look(self) -> bool:
        for tail in self._tails if self._calls else ():
            for row in tail.new_rows():
                for call in self._calls:
                    call(row)
        return False


def _default_path(cfg: ConfigBase[Any], command: str) -> Path:
    return Path("runs") / f"notebook-{command}-{zlib.crc32(to_text(cfg).encode()):08x}"


def _answer(row: Row) -> str:
    mark = {True: "right: ", False: "wrong: "}.get(row.get("reward", 0) >= 1.0)
    return f"{mark}{row.get('answer', row.get('completion', ''))}"
