"""Cost of each kill, from the event log of a finished run."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Recovery:
    """The recovery from one kill. Seconds count from the kill; None: not before the log ended.

    Attributes:
        back_s: until a new process of the role had started; of an elastic worker, until another had its lease.
        back_cpu_s: CPU seconds used until then; for a kill of the command or the raylet, by all roles together.
        update_s: until the next completed update; where the trainer ended, by the new one.
        gap_s: the longest time without a completed update, from the last before the kill to the first after `back_s`.
        redone: updates made a second time.
        lost: number of these, updates that a checkpoint on disk should have spared.
    """

    target: str
    step: int
    back_s: float | None
    back_cpu_s: float | None
    update_s: float | None
    gap_s: float | None
    redone: int = 0
    lost: int = 0


def recoveries(events: Sequence[Row]) -> list[Recovery]:
    """Return the recoveries from all kills in `events.jsonl`; `saved` of a kill is the newest checkpoint then."""
    kills = [index for index, row in enumerate(events) if row["event"] == "kill"]
    return [_recovery(events, kill, end) for kill, end in zip(kills, [*kills[1:], len(events)], strict=True)]


def seconds_by_role(found: Sequence[Recovery], field: str) -> dict[str, dict[str, float]]:
    """Return median and worst of a field in seconds, by role; all workers count as one role."""
    groups: dict[str, list[float]] = {}
    for recovery in found:
        if (value := getattr(recovery, field)) is not None:
            groups.setdefault(role_of(recovery.target), []).append(value)
    return {
        role: {"median": round(statistics.median(seconds), 2), "worst": round(max(seconds), 2)}
        for role, seconds in sorted(groups.items())
    }


def role_of(name: str) -> str:
    """Return the role of a target, such as `worker` for `worker-1`, `elastic-stopped` for `elastic-stopped-2`."""
    return name.rstrip("0123456789").rstrip("-") if name.startswith(("worker-", "elastic-")) else name


def _recovery(events: Sequence[Row], kill: int, end: int) -> Recovery:
    """Return the recovery from one kill; `end`: row of the next kill, whose later rows do not count."""
    at, target = events[kill]["time"], events[kill]["target"]
    back = next((i for i in range(kill, end) if _is_back(events[i], target)), None)
    since = kill if target == "raylet" else back or end
    trainer = next((i for i in range(since, end) if _starts(events[i], "trainer")), end)
    new_trainer = target == "command" or target.startswith("trainer") or (target == "raylet" and trainer < end)
    trainer = trainer if new_trainer else kill
    updates = [i for i in range(trainer, end) if _updates(events[i])]
    before = [row for row in events[:kill] if _updates(row)]
    redone = lost = 0
    if new_trainer and updates and before:
        done = max(row["step"] for row in events[: updates[0]] if _updates(row)) + 1
        first = events[updates[0]]["step"]
        redone = done - first
        lost = max(0, events[kill]["saved"] - first)
    return Recovery(
        target=target,
        step=events[kill]["step"],
        back_s=None if back is None else round(events[back]["time"] - at, 3),
        back_cpu_s=next((row["cpu"] for row in events[kill:end] if row["event"] == "back"), None),
        update_s=round(events[updates[0]]["time"] - at, 3) if updates else None,
        gap_s=_longest_gap(events, kill, back, end),
        redone=redone,
        lost=lost,
    )


def _longest_gap(events: Sequence[Row], kill: int, back: int | None, end: int) -> float | None:
    if back is None:
        return None
    last = [row["time"] for row in events[:kill] if _updates(row)][-1:]
    after = [(i, events[i]["time"]) for i in range(kill, end) if _updates(events[i])]
    until = next((n for n, (i, _) in enumerate(after) if i > back), None)
    if until is None or not last:
        return None
    times = last + [time for _, time in after[: until + 1]]
    return round(max(b - a for a, b in zip(times, times[1:], strict=False)), 3)


def _is_back(row: Row, target: str) -> bool:
    if target.startswith("elastic"):
        return row["event"] == "lease_expired" and row["worker"] == target
    if target in ("driver", "command"):
        return row["event"] == "session"
    return row["event"] == "back" if target == "raylet" else _starts(row, target)


def _starts(row: Row, role: str) -> bool:
    return row["event"] == "start" and row["role"] == role


def _updates(row: Row) -> bool:
    return row["event"] == "update" and row["role"] == "trainer"
