"""Metrics of a run (`metrics.jsonl`): one JSON row for each logged step."""

import errno
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from axlearn_like.run.disk import raising_disk_full
from mesh.errors import UserError
from mesh.files.bounded import read_bounded
from mesh.files.written import open_written, replace_file

_KEPT = 64  # rows of a silent writer
ROWS = 4 << 30  # bytes of a file of rows; the longest run that was measured has a thousandth of it


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file, without torn ones (the writer was killed in the middle, the disk was full).

    Raises:
        UserError: a line that has an end is not a JSON object, or it cannot be read.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    try:
        content = read_bounded(path, ROWS)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            rows += parse_row(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number} is not JSON: {line[:80]!r}") from error
    return rows


def parse_row(line: bytes) -> list[dict[str, Any]]:
    """Parse a line: one row, or none if the line is empty or torn (without the brace that ends a row).

    Raises:
        UserError: it is something else.
    """
    if not line.strip() or not line.rstrip().endswith(b"}"):
        return []
    try:
        return [json.loads(line)]
    except RecursionError as error:
        raise ValueError("nested deeper than the interpreter goes") from error


class MetricsWriter:
    """Appender of rows `{"phase", "step", "time", ...scalars}` to `metrics.jsonl` of a run directory.

    A row is one write to the operating system, so it outlives `kill -9` of this process. Scalars that are not finite
    are written as null: JSON has no literal for them.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        phase: str = "sft",
        resume_step: int | None = None,
        silent: bool | Callable[[], bool] = False,
    ):
        """Open the file and repair what a killed writer left.

        Args:
            run_dir: an existing directory.
            phase: part of the run that the rows belong to; each phase counts its own steps.
            resume_step: rows of this phase beyond this step are dropped: the resumed run writes them again.
            silent: write nothing (now); for a process whose rows another one writes. Its newest rows are kept: if it
                is silent no more, those that the other has not written come first.
        """
        self.path, self._phase = Path(run_dir) / "metrics.jsonl", phase
        self._silent = silent if callable(silent) else lambda: silent
        self._file: IO[bytes] | None = None
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        if not self._silent():
            self._file = self._opened(resume_step)

    def write(self, step: int, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Append one row and return it. `scalars` are numbers or arrays of one element. DiskFull: no room."""
        row = {"phase": self._phase, "step": int(step), "time": round(time.time(), 3)}
        row |= {name: _plain(value) for name, value in scalars.items()}
        self._kept.append((row["step"], json.dumps(row).encode() + b"\n"))
        if self._silent():
            return row
        if self._file is None:
            self._file = self._opened(None)
            last = max((row["step"] for row in read_rows(self.path) if row["phase"] == self._phase), default=-1)
            self._kept = deque((step, line) for step, line in self._kept if step > last)
        with raising_disk_full(self.path):
            while self._kept:
                line = self._kept.popleft()[1]
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "torn")
        return row

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _opened(self, resume_step: int | None) -> IO[bytes]:
        with raising_disk_full(self.path):
            self._repair(resume_step)
        return open_written(self.path, "ab")

    def _repair(self, resume_step: int | None) -> None:
        if not self.path.exists():
            return
        rows = read_rows(self.path)
        kept = [
            row for row in rows if resume_step is None or row.get("phase") != self._phase or row["step"] <= resume_step
        ]
        content = read_bounded(self.path, ROWS)
        torn = bool(content) and not content.endswith(b"\n")
        if torn or len(kept) < len(rows):
            replace_file(self.path, "".join(json.dumps(row) + "\n" for row in kept))


def _plain(value: Any) -> int | float | bool | str | None:
    if isinstance(value, (str, bool)) or value is None:
        return value
    number = value.item() if hasattr(value, "item") else value
    return None if isinstance(number, float) and not math.isfinite(number) else number
