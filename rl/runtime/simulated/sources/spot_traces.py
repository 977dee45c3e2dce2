"""Published traces of spot capacity: instances there are at a time, as they stand in three public repositories.

* SkyPilot's `spot-traces` ("Can't Be Late", NSDI'24): JSON, `{"metadata": {"gap_seconds": 300}, "data": [16, 14]}`.
* Bamboo (NSDI'23): lines `SECONDS,INSTANCES` without a header.
* Parcae (NSDI'24): lines `MILLISECONDS,INSTANCES` without a header: all times are whole minutes in milliseconds.

The greatest count of a trace stands for all workers: of 64 workers 48 are there while 12 of 16 instances are.
"""

import json
import math
from collections.abc import Sequence
from itertools import pairwise

from mesh import UserError

Counts = list[tuple[float, int]]  # seconds, and the instances from then on

_MINUTE_MS = 60_000


def read_counts(text: str, where: str) -> Counts | None:
    """Return a published trace's counts; None: another form (UserError: names the line or entry that is wrong)."""
    if text.lstrip().startswith("{") and '"gap_seconds"' in text:
        found = _of_skypilot(text, where)
    elif text[:1].isdigit():
        found = _of_lines(text, where)
    else:
        return None
    for number, ((before, _), (after, _)) in enumerate(pairwise(found), start=2):
        if after < before:
            raise UserError(f"{where}, line {number}: time {after:g} is before {before:g}; expected times in order")
    if not any(count for _, count in found):
        raise UserError(f"{where}: there is no instance at any time; expected a trace with some")
    return found


def workers_there(counts: Counts, workers: int) -> Counts:
    """Return the times at which the number of workers changes, and the number from then on."""
    most, found = max(count for _, count in counts), [(0.0, workers)]
    for time, count in counts:
        there = round(workers * count / most)
        if time == found[-1][0]:  # the last of several counts of a time is what holds
            found.pop()
        if not found or there != found[-1][1]:
            found.append((time, there))
    return found


def _of_skypilot(text: str, where: str) -> Counts:
    try:
        table = json.loads(text)
        gap, data = float(table["metadata"]["gap_seconds"]), table["data"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f'{where}: expected {{"metadata": {{"gap_seconds": N}}, "data": [COUNT, ...]}}') from None
    if not (0 < gap < math.inf) or not isinstance(data, list):
        raise UserError(f"{where}: expected gap_seconds above 0 and a list of counts, got {gap:g}")
    return [(n * gap, _count(value, f"{where}, data[{n}]")) for n, value in enumerate(data)]


def _of_lines(text: str, where: str) -> Counts:
    rows = [(n, line.split(",")) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]
    found: Counts = []
    for number, row in rows:
        here = f"{where}, line {number}"
        try:
            time, count = float(row[0]), float(row[1])
        except (ValueError, IndexError):
            raise UserError(f"{here}: expected TIME,INSTANCES, got {','.join(row)[:60]!r}") from None
        if len(row) != 2 or not (0 <= time < math.inf):
            raise UserError(f"{here}: expected TIME,INSTANCES with a time of 0 or more, got {','.join(row)[:60]!r}")
        found.append((time, _count(count, here)))
    return [(time / 1000, count) for time, count in found] if _in_milliseconds([time for time, _ in found]) else found


def _in_milliseconds(times: Sequence[float]) -> bool:
    """Return True if all times are whole minutes in milliseconds."""
    return any(times) and all(time % _MINUTE_MS == 0 for time in times)


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise UserError(f"{where}: expected a count of instances, 0 or more, got {value!r}")
    return int(value)
