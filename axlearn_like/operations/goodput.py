"""Where the time of a run went, by cause, over all its restarts.

The trainer's clock is always charged to one cause and tells the event log now and then; `account` adds the log up.
Goodput is the share of the time since the run first began that went into steps that count: a step done twice, because
a process died after its last checkpoint, counts once.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from axlearn_like.run.directory import EventLog
from axlearn_like.run.disk import DiskFull

# Cause -> what it says in tables, in their order.
CAUSES = {
    "step": "steps that count",
    "input": "waiting for input",
    "compile": "compilation",
    "checkpoint": "waiting for checkpoints",
    "evaluation": "evaluation",
    "check": "comparing bits",
    "startup": "start-up, restoring",
    "lost": "steps done again after a restart",
    "down": "no process",
    "idle": "anything else",
}


class CauseClock:
    """Charges every moment to one cause; cheap enough for every step (no system call but reading the time)."""

    def __init__(self, events: EventLog, *, began: float | None = None, every: float = 10.0):
        """Begins in the cause "startup".

        Args:
            events: where a row `spent` is written every so many seconds.
            began: unix time since when it is charged; None: now.
            every: seconds between rows: so much of a killed process may go untold.
        """
        now = time.time()
        self.began = now if began is None else began
        self.cause = "startup"  # set it to charge the moments since the last change to something else
        self.totals: dict[str, float] = defaultdict(float)
        self._events, self._every = events, every
        self._told: dict[str, float] = {}
        self._step = self._told_step = 0
        self._since = self._told_at = time.monotonic() - (now - self.began)

    def __enter__(self) -> "CauseClock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with suppress(DiskFull):
                self.tell()

    def start(self, step: int) -> None:
        """The start is over; `step` are completed. The event log has been told of the start."""
        self.to("idle")
        self._step = self._told_step = step
        self.tell()

    def to(self, cause: str) -> None:
        """From now on it is `cause`."""
        now = time.monotonic()
        self.totals[self.cause] += now - self._since
        self._since, self.cause = now, cause

    @contextmanager
    def spending(self, cause: str) -> Iterator[None]:
        """Charges the block to `cause`, then goes back to what it was."""
        before = self.cause
        self.to(cause)
        try:
            yield
        finally:
            self.to(before)

    def completed(self, step: int) -> None:
        """Tells that `step` is done, and the event log if it is time."""
        self._step = step
        if self._since - self._told_at >= self._every:
            self.tell()

    def tell(self) -> None:
        """Writes what was spent since the last row."""
        self.to(self.cause)
        spent = {cause: seconds - self._told.get(cause, 0.0) for cause, seconds in self.totals.items()}
        causes = {cause: round(seconds, 4) for cause, seconds in spent.items() if seconds > 0}
        row = {"since": self._told_step, "step": self._step, "seconds": round(sum(spent.values()), 4)}
        self._events.append("trainer", "spent", **row, causes=causes)
        self._told, self._told_step, self._told_at = dict(self.totals), self._step, self._since


@dataclass(frozen=True)
class Account:
    """Seconds by cause, and how many processes the run took so far."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    sessions: int = 0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def shares(self, more: Mapping[str, float] | None = None) -> dict[str, float]:
        """Fractions of the whole by cause, those of 0 left out; `more` seconds are added first."""
        seconds = {cause: self.seconds.get(cause, 0.0) + (more or {}).get(cause, 0.0) for cause in CAUSES}
        total = sum(seconds.values())
        return {cause: spent / total for cause, spent in seconds.items() if spent > 0}


def account(events: Iterable[Mapping[str, Any]]) -> Account:
    """Adds up the rows `start` (with `began`), `spent` and `stop` of the role "trainer", in the order of the log.

    The time from the last row of a process to the beginning of the next is "down", except after a run that was done.
    What a killed process did after its last row `spent` is in it, too: nobody told of it.
    """
    seconds: dict[str, float] = defaultdict(float)
    sessions, last, done = 0, None, False
    spans: list[tuple[int, int, float]] = []  # of steps: from, to, seconds
    for row in events:
        if row.get("role") != "trainer" or row.get("event") not in ("start", "spent", "stop"):
            continue
        now = float(row["time"])
        if row["event"] == "start":
            if "began" not in row:
                continue  # of a trainer that keeps no account
            began = float(row["began"])
            if last is not None and not done:
                seconds["down"] += max(0.0, began - last)
            spans = _give_up(spans, int(row["step"]), seconds)
            sessions, done = sessions + 1, False
        elif row["event"] == "spent":
            for cause, spent in row["causes"].items():
                seconds[cause] += spent
            spans.append((int(row["since"]), int(row["step"]), row["causes"].get("step", 0.0)))
        else:
            done = row.get("reason") == "done"
        last = now
    return Account(dict(seconds), sessions)


def _give_up(spans: list[tuple[int, int, float]], step: int, seconds: dict[str, float]) -> list[tuple[int, int, float]]:
    """Moves what was spent on steps beyond `step` to "lost"; a row over several steps is divided evenly."""
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


def lines(found: Account) -> list[str]:
    """The account as a table for the terminal; empty if nothing was accounted for."""
    if not found.total:
        return []
    shares = found.shares()
    plural = "es" if found.sessions != 1 else ""
    head = f"goodput {shares.get('step', 0.0):.1%} of {found.total:,.1f} s in {found.sessions} process{plural}"
    return [head] + [f"  {CAUSES[c]:<34}{found.seconds[c]:>12,.1f} s {share:>7.1%}" for c, share in shares.items()]


def process_began() -> float:
    """Unix time at which this process was started; now, where /proc does not tell."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return min(time.time(), time.time() - up + ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError, ValueError):
        return time.time()
