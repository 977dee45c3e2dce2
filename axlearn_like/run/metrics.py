"""Metrics of a run (`metrics.jsonl`): one JSON row for each logged step."""

import errno
import json
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any

from axlearn_like.run.disk import raising_disk_full
from mesh.errors import UserError
from mesh.files.bounded import read_bounded
from mesh.files.written import open_written, replace_file

_KEPT = 64  # rows of a silent writer
ROWS = 4 << 30  # bytes of a file of rows; the longest run that was measured has a thousandth of it


def read_rows(path: str | Path, events: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file, without torn ones (the writer was killed in the middle, the disk was full).

    `events`: only rows of these; lines that name none of them are not parsed.

    Raises:
        UserError: a line that has an end is not a JSON object, or it cannot be read.
    """
    content = _read(Path(path))
    if not events:
        return [row for at, line in enumerate(content.split(b"\n"), 1) for row in _parse_line(path, at, line)]
    rows = list[dict[str, Any]]()
    for start in _starts(content, [f'"{event}"'.encode() for event in events]):
        end = content.find(b"\n", start)
        line = content[start : len(content) if end < 0 else end]
        try:
            rows += parse_row(line)
        except ValueError as error:
            raise _refusal(path, content.count(b"\n", 0, start) + 1, line) from error
    return [row for row in rows if row.get("event") in events]


def _starts(content: bytes, words: list[bytes]) -> list[int]:
    """Return where the lines begin that have one of the words."""
    found = set[int]()
    for word in words:
        at = content.find(word)
        while at >= 0:
            found.add(content.rfind(b"\n", 0, at) + 1)
            end = content.find(b"\n", at)
            at = content.find(word, end) if end >= 0 else -1
    return sorted(found)


def newest_rows(path: str | Path, phase: str, *, count: int) -> list[dict[str, Any]]:
    """Return the last `count` rows of a phase, in their order, without parsing those before (UserError: see above)."""
    found: list[dict[str, Any]] = []
    lines = _read(Path(path)).split(b"\n")
    while lines and len(found) < count:
        rows = _parse_line(path, len(lines), lines.pop())
        found += [row for row in rows if row["phase"] == phase]
    return found[::-1]


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, ROWS) if path.exists() else b""
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _parse_line(path: str | Path, number: int, line: bytes) -> list[dict[str, Any]]:
    try:
        return parse_row(line)
    except ValueError as error:
        raise _refusal(path, number, line) from error


def _refusal(path: str | Path, number: int, line: bytes) -> UserError:
    return UserError(f"{path}, line {number} is not JSON: {line[:80]!r}")


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
        """Drop what a killed writer has torn, and the rows of this phase beyond a step."""
        lines = _read(self.path).split(b"\n")
        torn = bool(lines[-1])
        if torn:  # the row may be whole but for the end of its line
            lines[-1:] = [lines[-1], b""] if _parse_line(self.path, len(lines), lines[-1]) else [b""]
        beyond = set[int]() if resume_step is None else self._beyond(lines, resume_step)
        if torn or beyond:
            replace_file(self.path, b"\n".join(line for at, line in enumerate(lines) if at not in beyond))

    def _beyond(self, lines: list[bytes], step: int) -> set[int]:
        """Return the places of this phase's rows beyond a step: among the last, for a phase's steps only grow."""
        found = set[int]()
        for at in range(len(lines) - 1, -1, -1):
            for row in _parse_line(self.path, at + 1, lines[at]):
                if row.get("phase") == self._phase:
                    if row["step"] <= step:
                        return found
                    found.add(at)
        return found


def _plain(value: Any) -> int | float | bool | str | None:
    if isinstance(value, (str, bool)) or value is None:
        return value
    number = value.item() if hasattr(value, "item") else value
    return None if isinstance(number, float) and not math.isfinite(number) else number
