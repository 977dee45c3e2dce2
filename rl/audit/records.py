"""Logs of a run directory, read for its audit: events, metrics and settings, divided by trainer process."""

import dataclasses
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from axlearn_like.config import recorded_values
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import ROWS
from mesh.files.bounded import is_readable, read_bounded

Row = dict[str, Any]

_TEXTS = ("event", "role", "target", "who", "phase")
_EVENT = {"event", "role", "time"}
_APART = 5.0  # seconds by which a row may seem to be older than the one before


@dataclasses.dataclass(frozen=True, slots=True)
class Incarnation:
    """Log rows of one process of the trainer, from its start to its end."""

    number: int
    rows: tuple[Row, ...]

    @property
    def first(self) -> int | None:
        """The step restored from the checkpoint: what a trainer publishes first is what it restored."""
        return next((row["version"] for row in self.rows if row["event"] == "push"), None)

    @property
    def steps(self) -> list[int]:
        """Steps of its updates, in order."""
        return [row["step"] for row in self.rows if row["event"] == "update"]


class Records:
    """Events, metrics and settings of a run directory, as far as they can be read."""

    def __init__(self, path: str | Path):
        run = RunDirectory.attach(path)
        events, torn = _rows(run.events_path)
        self.events = [row for row in events if row.keys() >= _EVENT and type(row["time"]) in (int, float)]
        self.torn = torn + len(events) - len(self.events)
        rows, torn = _rows(run.metrics_path)
        self.metrics, self.torn = [row for row in rows if row.get("phase") == "rl"], self.torn + torn
        self._config = read_settings(run)
        self.incarnations = list(self._incarnations())

    def setting(self, path: str, default: Any = None) -> Any:
        """Return a value of the config by its path."""
        return self._config.get(path, default)

    @property
    def repeatable(self) -> bool:
        """True if a version that is made again must be the same: rollouts come from a version that the plan names."""
        return self.setting("controller.weights", "pinned") == "pinned" or self.setting("staleness", 0) == 0

    @property
    def clocks_apart(self) -> bool:
        """True if a row was written well before its predecessor, according to their times."""
        times = [row["time"] for row in self.events]
        return any(after < before - _APART for before, after in pairwise(times))

    def _incarnations(self) -> Iterator[Incarnation]:
        current: list[Row] = []
        number = 0
        for row in self.events:
            begins = row["event"] == "start" and row["role"] == "trainer"
            if begins and any(r["event"] in ("push", "update") for r in current):
                yield Incarnation(number, tuple(current))
                current, number = [], number + 1
            if row["role"] == "trainer":
                current.append(row)
        if current:
            yield Incarnation(number, tuple(current))


def _rows(path: Path) -> tuple[list[Row], int]:
    """The rows of a JSONL file and how many lines are none: a disk that ran full tears lines in the middle."""
    if not is_readable(path):
        return [], 0
    rows, torn = [], 0
    for line in read_bounded(path, ROWS).splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and all(type(row.get(name, "")) is str for name in _TEXTS):
            rows.append(row)
        else:
            torn += bool(line.strip())
    return rows, torn


def read_settings(run: RunDirectory) -> dict[str, Any]:
    """Return the plain values of a run's config by their paths; empty if it has none."""
    path = run.config_path
    return recorded_values(read_bounded(path).decode(errors="replace")) if is_readable(path) else {}
