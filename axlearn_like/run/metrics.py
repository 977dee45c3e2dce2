"""Metrics: one JSON row per logged step on disk, one line or bar on the terminal."""

import errno
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from axlearn_like.run.disk import telling_full_disk


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; torn ones (the writer was killed in the middle, or the disk was full) are left out.

    Raises:
        ValueError: a line that has an end is not a JSON object.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            rows += parse_row(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {line[:80]!r}") from error
    return rows


def parse_row(line: bytes) -> list[dict[str, Any]]:
    """The row of a line; none if the line is empty, or torn: without the brace that ends a row.

    Raises:
        ValueError: it is something else.
    """
    if not line.strip() or not line.rstrip().endswith(b"}"):
        return []
    return [json.loads(line)]


class MetricsWriter:
    """Appends rows `{"phase", "step", "time", ...scalars}` to `metrics.jsonl` of a run directory.

    A row is one write to the operating system, so it outlives `kill -9` of this process. Scalars
    that are not finite are written as null, because JSON has no word for them.
    """

    def __init__(
        self, run_dir: str | Path, *, phase: str = "sft", resume_step: int | None = None, silent: bool = False
    ):
        """Opens the file, mending what a killed writer left.

        Args:
            run_dir: an existing directory.
            phase: which part of the run the rows are of; each phase counts its own steps.
            resume_step: rows of this phase beyond this step are dropped: the resumed run writes
                them again.
            silent: the file is left alone; for a process whose rows another one writes.
        """
        self.path = Path(os.devnull) if silent else Path(run_dir) / "metrics.jsonl"
        self._phase = phase
        if silent:
            self._file = open(self.path, "ab", buffering=0)
            return
        with telling_full_disk(self.path):
            self._mend(resume_step)
        self._file = open(self.path, "ab", buffering=0)

    def write(self, step: int, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Appends one row and returns it. `scalars` are numbers or arrays of one element. DiskFull: no room."""
        row = {"phase": self._phase, "step": int(step), "time": round(time.time(), 3)}
        row |= {name: _plain(value) for name, value in scalars.items()}
        line = json.dumps(row).encode() + b"\n"
        with telling_full_disk(self.path):
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "torn")
        return row

    def close(self) -> None:
        self._file.close()

    def _mend(self, resume_step: int | None) -> None:
        if not self.path.exists():
            return
        rows = read_rows(self.path)
        kept = [
            row for row in rows if resume_step is None or row.get("phase") != self._phase or row["step"] <= resume_step
        ]
        torn = not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        if torn or len(kept) < len(rows):
            mended = self.path.with_suffix(".jsonl.tmp")
            mended.write_text("".join(json.dumps(row) + "\n" for row in kept))
            os.replace(mended, self.path)


def _plain(value: Any) -> int | float | bool | str | None:
    if isinstance(value, (str, bool)) or value is None:
        return value
    number = value.item() if hasattr(value, "item") else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


class Progress:
    """Step, loss, speed and time left: a bar on a terminal, a line now and then elsewhere.

    Now and then: after some seconds, and after a tenth of the time so far; a day's run makes a hundred lines.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        title: str = "train",
        every_seconds: float = 5.0,
        stream: TextIO | None = None,
    ):
        self._total, self._start, self._title = total, start, title
        self._every_seconds = every_seconds
        self._stream = sys.stderr if stream is None else stream
        self._began = time.monotonic()
        self._spoke = -math.inf
        self._tokens = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Progress":
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total, completed=self._start, note="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, *, loss: float | None = None, tokens: float = 0.0, note: str = "") -> None:
        """Shows `step` of the total. `tokens`: how many were processed since the last call."""
        self._tokens += tokens
        now = time.monotonic()
        elapsed = max(now - self._began, 1e-9)
        notes = [note] if note else []
        notes += [] if loss is None else [f"loss {loss:.4f}"]
        notes += [f"{self._tokens / elapsed:,.0f} tok/s"] if self._tokens else []
        if self._bar is not None:
            self._bar.update(self._task, completed=step, note=", ".join(notes))
        elif now - self._spoke >= max(self._every_seconds, elapsed / 10) or step >= self._total:
            self._spoke = now
            left = elapsed / max(step - self._start, 1) * (self._total - step)
            eta = [f"{left:,.0f} s left"] if step < self._total else []
            line = ", ".join([f"{self._title}: step {step} of {self._total}", *notes, *eta])
            print(line, file=self._stream, flush=True)
