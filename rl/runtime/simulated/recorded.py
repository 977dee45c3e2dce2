"""Events of a simulated run, kept in memory: hundreds of thousands come in a minute."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, override

from axlearn_like.run.clock import RunClock
from axlearn_like.run.events import EventLog
from mesh.files.written import open_written


class RecordedEvents(EventLog):
    """An event log that is written at `flush`."""

    def __init__(self, path: Path, clock: RunClock, grain: int = 1):
        """`grain`: tokens for which each of a rollout's arrays stands."""
        super().__init__(path, clock=clock)
        self._grain = grain
        self.rows: list[dict[str, Any]] = []
        self._written = 0

    @override
    def append(self, role: str, event: str, **fields: Any) -> None:
        if "tokens" in fields:
            fields["tokens"] *= self._grain
        self.rows.append({"time": round(self.clock.wall(), 3), "role": role, "event": event, **fields})

    def flush(self) -> None:
        """Write the rows that are not written yet."""
        write_rows(self.path, self.rows[self._written :])
        self._written = len(self.rows)


class RecordedLogs:
    """The events of a run as its supervisor follows them; `step`: completed updates."""

    def __init__(self, events: RecordedEvents, step: Callable[[], int]):
        self._events, self._completed = events, step
        self._read = self._seen = 0
        self.pids, self.left = dict[str, int](), set[str]()

    @property
    def step(self) -> int:
        """Completed updates."""
        return self._completed()

    def updated(self) -> bool:
        """Return True if there was an update since the last look."""
        before, self._seen = self._seen, self.step
        return self._seen > before

    def new_events(self) -> list[dict[str, Any]]:
        """Return the new events."""
        rows, self._read = self._events.rows[self._read :], len(self._events.rows)
        return rows

    def process(self, name: str) -> str:
        """Return the name of a role."""
        return name


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file."""
    with open_written(path) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
