"""Spans of work by role, phases and published versions, from the event log of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.report.load import Run, number

KINDS = {
    "update": ("update", "c1"),
    "generate": ("generate", "c2"),
    "audit": ("audit", "c2"),
    "score": ("verify", "c5"),
    "push": ("push weights", "c6"),
    "pull": ("pull weights", "c3"),
    "eval": ("evaluate", "c4"),
    "sft": ("SFT", "c7"),
    "other": ("other work", "c8"),
    "wait": ("waiting", "idle"),
}
_ORDER = ("driver", "controller", "trainer", "reference", "parameter-server", "worker", "verifier")


@dataclass(frozen=True)
class Span:
    """One piece of work, in unix seconds."""

    kind: str
    start: float
    end: float


def lanes(run: Run) -> dict[str, list[Span]]:
    """Return spans by role, roles in the order of the data flow, spans by start.

    Roles that log no spans have a lane, too, which shows when they were down.
    """
    found: dict[str, list[Span]] = {}
    for row in run.events:
        if row.get("event") == "start":
            found.setdefault(str(row.get("role")), [])
        seconds, name = number(row.get("seconds")), str(row.get("event"))
        if seconds is None or name == "phase":
            continue
        kind = name if name in KINDS else "other"
        end = float(row["time"])
        found.setdefault(str(row.get("role")), []).append(Span(kind, end - seconds, end))
    ordered = sorted(found, key=lambda role: (_rank(role), role))
    return {role: sorted(found[role], key=lambda span: span.start) for role in ordered}


def _rank(role: str) -> int:
    return next((rank for rank, prefix in enumerate(_ORDER) if role.startswith(prefix)), len(_ORDER))


def busy(spans: Sequence[Span], start: float, end: float) -> float:
    """Return the share of [start, end] in which at least one span other than waiting was under way."""
    total, reached = 0.0, start
    for span in spans:
        low, high = max(span.start, reached), min(span.end, end)
        if span.kind != "wait" and high > low:
            total, reached = total + high - low, high
    return total / (end - start)


def phases(run: Run) -> list[tuple[str, float, float]]:
    """Return phases as (name, start, end): from phase events, else from the times of the metrics."""
    rows = [row for row in run.events if row.get("event") == "phase"]
    found = []
    for row, after in zip(rows, [*rows[1:], None], strict=False):  # no row, no next phase
        name, time, seconds = (
            str(row.get("phase") or row.get("name")),
            float(row["time"]),
            number(row.get("seconds")),
        )
        if seconds is not None:
            found.append((name, time - seconds, time))
        else:
            found.append((name, time, float(after["time"]) if after else last_event(run)))
    if found:
        return found
    for phase in ("sft", "rl"):
        times = [time for row in run.rows(phase) if (time := number(row.get("time"))) is not None]
        if times:
            found.append((phase, min(times), max(times)))
    return found


def versions(run: Run, start: float, end: float) -> list[tuple[float, int]]:
    """Return the publications of versions as (unix time, version); a version made again appears again."""
    return [
        (float(row["time"]), int(version))
        for row in run.events
        if row.get("event") == "push"
        and row.get("role") == "trainer"
        and (version := number(row.get("version"))) is not None
        and start <= float(row["time"]) <= end
    ]


def last_event(run: Run) -> float:
    """Return the unix time of the last event."""
    return max([float(row["time"]) for row in run.events], default=run.start)
