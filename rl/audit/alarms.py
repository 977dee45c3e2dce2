"""Alarms: rules by which the metrics of an update tell that a run fails to learn, for the terminal and the report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

Row = Mapping[str, Any]  # the metrics of an update
_COMPARED = ("mean", "max")


class Alarm(NamedTuple):
    """A rule.

    Attributes:
        name: of the alarm in report.json.
        is_raised: True for the metrics of an update that raise it.
        meaning: what happened, and what to look at.
    """

    name: str
    is_raised: Callable[[Row], bool]
    meaning: str


ALARMS = (
    Alarm(
        "empty_batch",
        lambda row: row.get("updates") == 0,
        "nothing in the batch had a gradient, so nothing was updated (zero_variance_fraction, unscored_fraction and "
        "truncation_fraction say why)",
    ),
    Alarm(
        "numerics_drift",
        lambda row: any(
            row.get(f"logprob_diff_{of}", 0) > row.get(f"logprob_diff_{of}_bound", inf) for of in _COMPARED
        ),
        "trainer and sampler disagree on log-probabilities of the same weights by more than rounding explains "
        "(logprob_diff_mean and _max against their _bound): importance ratios are wrong by as much",
    ),
)


class Alarms:
    """Counts of alarms in the rows of a run, as these come."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def lines(self, rows: Sequence[Row]) -> Iterator[str]:
        """Yield a line for the 1st, 2nd, 4th, 8th ... update that raises an alarm."""
        for row in rows:
            for alarm in ALARMS:
                if not alarm.is_raised(row):
                    continue
                self._counts[alarm.name] = count = self._counts.get(alarm.name, 0) + 1
                if count & (count - 1) == 0:
                    times = f", the {count}th time" if count > 2 else ""
                    yield f"alarm {alarm.name} at update {row['step']}{times}: {alarm.meaning}"


def raised_alarms(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the alarms that were raised: number of updates, steps of the first and the last, and the meaning."""
    found: dict[str, dict[str, Any]] = {}
    for alarm in ALARMS:
        if steps := [row["step"] for row in rows if alarm.is_raised(row)]:
            found[alarm.name] = {"count": len(steps), "first": steps[0], "last": steps[-1], "meaning": alarm.meaning}
    return found
