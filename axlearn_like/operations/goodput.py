"""Goodput: the time of a run by cause, over all its restarts.

The trainer's clock is always charged to one cause and is written to the event log now and then; `account` adds the log
up. Goodput is the share of the time since the run first began that went into steps that count: a step done twice,
because a process died after its last checkpoint, counts once.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axlearn_like.run.disk import DiskFull
from axlearn_like.run.events import EventLog

# Cause -> its description in tables, in their order.
CAUSES = {
    "step": "steps that count",
    "input": "waiting for input",
    "compile": "compilation",
    "checkpoint": "waiting for checkpoints",
    "evaluation": "evaluation",
    "sdc_check": "SDC check",
    "startup": "start-up, restoring",
    "lost": "steps done again after a restart",
    "down": "no process",
    "idle": "anything else",
}


ACCOUNTED = ("train_begin", "goodput", "train_end")  # events that have it


class CauseClock:
    """Clock that charges every moment to one cause; cheap enough for every step (it only reads the time)."""

    def __init__(self, events: EventLog, *, began: float | None = None, every: float = 10.0):
        """Start in the cause "startup".

        Args:
            events: receive a row `goodput` every so many seconds.
            began: unix time from which on time is charged; None: now.
            every: seconds between rows: as much of a killed process may be missing from the log.
        """
        now = time.time()
        self.began = now if began is None else began
        self.cause = "startup"  # set it to charge the moments since the last change to something else
        self.totals: dict[str, float] = defaultdict(float)
        self._events, self._every = events, every
        self._logged: dict[str, float] = {}
        self._step = self._logged_step = 0
        self._since = self._logged_at = time.monotonic() - (now - self.began)

    def __enter__(self) -> "CauseClock":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            with suppress(DiskFull):
                self.flush()

    def start(self, step: int) -> None:
        """End the cause "startup"; `step` updates are completed. The event log has the row `train_begin` already."""
        self.to("idle")
        self._step = self._logged_step = step
        self.flush()

    def to(self, cause: str) -> None:
        """Charge the time from now on to `cause`."""
        now = time.monotonic()
        self.totals[self.cause] += now - self._since
        self._since, self.cause = now, cause

    @contextmanager
    def spending(self, cause: str) -> Iterator[None]:
        """Charge the block to `cause`, then return to the cause before."""
        before = self.cause
        self.to(cause)
        try:
            yield
        finally:
            self.to(before)

    def completed(self, step: int) -> None:
        """Record that `step` is completed; write to the event log if a row is due."""
        self._step = step
        if self._since - self._logged_at >= self._every:
            self.flush()

    def flush(self) -> None:
        """Write the time spent since the last row."""
        self.to(self.cause)
        spent = {cause: seconds - self._logged.get(cause, 0.0) for cause, seconds in self.totals.items()}
        causes = {cause: round(seconds, 4) for cause, seconds in spent.items() if seconds > 0}
        row = {"since": self._logged_step, "step": self._step, "seconds": round(sum(spent.values()), 4)}
        self._events.append("trainer", "goodput", **row, causes=causes)
        self._logged, self._logged_step, self._logged_at = dict(self.totals), self._step, self._since


@dataclass(frozen=True)
class Account:
    """Seconds of a run by cause, and the number of its processes so far."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    sessions: int = 0

    @property
    def total(self) -> float:
        """Seconds of all causes."""
        return sum(self.seconds.values())

    def shares(self, more: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the fractions of the whole by cause, without those that are 0; `more` seconds are added first."""
        seconds = {cause: self.seconds.get(cause, 0.0) + (more or {}).get(cause, 0.0) for cause in CAUSES}
        total = sum(seconds.values())
        return {cause: spent / total for cause, spent in seconds.items() if spent > 0}


def account(events: Iterable[Mapping[str, Any]]) -> Account:
    """Add up the rows `train_begin`, `goodput` and `train_end` of an event log, in its order.

    The time from the last row of a process to the beginning of the next is "down", except after a run that was done.
    It includes what a killed process did after its last row `goodput`, of which there is no record.
    """
    seconds: dict[str, float] = defaultdict(float)
    sessions, last, done = 0, None, False
    spans: list[tuple[int, int, float]] = []  # spans of steps: from, to, seconds
    for row in events:
        if row.get("role") != "trainer" or row.get("event") not in ACCOUNTED:
            continue
        now = float(row["time"])
        if row["event"] == "train_begin":
            began = float(row["began"])
            if last is not None and not done:
                seconds["down"] += max(0.0, began - last)
            spans = _give_up(spans, int(row["step"]), seconds)
            sessions, done = sessions + 1, False
        elif row["event"] == "goodput":
            for cause, spent in row["causes"].items():
                seconds[cause] += spent
            spans.append((int(row["since"]), int(row["step"]), row["causes"].get("step", 0.0)))
        else:
            done = row.get("reason") == "done"
        last = now
    return Account(dict(seconds), sessions)


def _give_up(spans: list[tuple[int, int, float]], step: int, seconds: dict[str, float]) -> list[tuple[int, int, float]]:
    """Move what was spent on steps beyond `step` to "lost"; a row over several steps is divided evenly."""
    kept = []
    for first, end, spent in spans:
        if end > step:
            lost = spent * (end - max(first, step)) / (end - first) if end > first else spent
            seconds["step"] -= lost
            seconds["lost"] += lost
            first, end, spent = first, step, spent - lost
        if end > first:
            kept.append((first, end, spent))
    return kept


def account_lines(found: Account) -> list[str]:
    """Return the account as lines of a table for the terminal; none for an empty account."""
    if not found.total:
        return []
    shares = found.shares()
    plural = "es" if found.sessions != 1 else ""
    head = f"goodput {shares.get('step', 0.0):.1%} of {found.total:,.1f} s in {found.sessions} process{plural}"
    return [head] + [f"  {CAUSES[c]:<34}{found.seconds[c]:>12,.1f} s {share:>7.1%}" for c, share in shares.items()]


def process_began() -> float:
    """Return the unix time at which this process was started; now, where there is no /proc."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return min(time.time(), time.time() - up + ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError, ValueError):
        return time.time()
