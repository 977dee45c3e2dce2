"""The event log of a run (`events.jsonl`), and timed spans in it: the timeline of a report is drawn from these."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axlearn_like.run.clock import REAL, RunClock
from axlearn_like.run.disk import raising_disk_full
from mesh.files.written import open_written


class EventLog:
    """Append-only file of rows `{"time", "role", "event", ...}` that several processes may share.

    Each row is one write to a file opened for appending, which the operating system does not interleave. A row that a
    full disk has cut off is ended by a new line before the next one.
    """

    def __init__(self, path: str | Path, *, silent: bool | Callable[[], bool] = False, clock: RunClock = REAL):
        """`silent`: nothing is written (now); for a process whose events another one logs. `clock`: times of rows."""
        self.path, self._silent, self.clock = Path(path), silent, clock

    def append(self, role: str, event: str, **fields: Any) -> None:
        """Log `event` of `role` now; a span has its duration in `seconds`. DiskFull: there is no room."""
        if self._silent() if callable(self._silent) else self._silent:
            return
        row = {"time": round(self.clock.wall(), 3), "role": role, "event": event, **fields}
        with raising_disk_full(self.path):
            self._append(json.dumps(row).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        with open_written(self.path, "ab+") as file:
            size = os.fstat(file.fileno()).st_size
            if size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "torn")


@contextmanager
def span(events: EventLog, role: str, event: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Time a block and log it with its `seconds` when it ends well; the yielded dict takes further fields.

    `cpu_seconds` are those that the whole process used in it, `cpu` those since its start.
    """
    began = events.clock(), events.clock.cpu()
    yield fields
    events.append(role, event, **spent_since(events, *began), **fields)


def spent_since(events: EventLog, began: float, cpu: float) -> dict[str, float]:
    """Return the fields of a span that began at these seconds of the clock, and at these CPU seconds of the process."""
    now = events.clock.cpu()
    return {"seconds": round(events.clock() - began, 4), "cpu_seconds": round(now - cpu, 4), "cpu": round(now, 4)}
