"""Rules of alarms: each observes the metrics of every update, in order, and says whether its alarm is on."""

from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, Protocol

Row = Mapping[str, Any]  # the metrics of an update


class Rule(Protocol):
    """A rule."""

    name: str  # name of the alarm in report.json
    meaning: str  # event, and what to look at
    lasting: bool  # the alarm is on until it is over; else each update is judged by itself

    def observe(self, row: Row) -> str | None:
        """Return the finding after this update if the alarm is on, else None."""
        ...


class EachUpdate:
    """Alarm of the updates whose metrics fulfil a condition."""

    lasting = False

    def __init__(self, name: str, condition: Callable[[Row], bool], meaning: str):
        self.name, self.meaning = name, meaning
        self._condition = condition

    def observe(self, row: Row) -> str | None:
        """Return "" if the update fulfils the condition."""
        return "" if self._condition(row) else None


class Level:
    """Alarm while the mean of a metric over the latest updates is beyond a limit.

    It is over once the mean is within the limit by a margin, so a mean that stays near the limit is one alarm. Updates
    without the metric change nothing.
    """

    lasting = True

    def __init__(
        self,
        name: str,
        metric: str,
        limit: float,
        meaning: str,
        *,
        window: int,
        margin: float,
        below: bool = False,
        of_start: bool = False,
    ):
        """Take the limit and how it is compared.

        Args:
            limit: limit of its mean.
            window: updates in the mean.
            margin: fraction of the limit by which the mean must come back.
            below: the limit is a least value, not a greatest one.
            of_start: the limit is a fraction of the mean over the first `window` updates.
        """
        self.name, self.meaning = name, meaning
        self._metric, self._limit, self._below, self._of_start = metric, limit, below, of_start
        self._back = 1 + margin if below else 1 - margin
        self._values: deque[float] = deque(maxlen=window)
        self._start: float | None = None
        self._on = False

    def observe(self, row: Row) -> str | None:
        """Return the mean and the limit, in words."""
        if self._metric in row:
            self._values.append(row[self._metric])
        if not self._values or len(self._values) < (self._values.maxlen or 0):
            return None
        mean = fmean(self._values)
        self._start = mean if self._start is None else self._start
        limit = self._limit * (self._start if self._of_start else 1.0)
        bound = limit * (self._back if self._on else 1.0)
        self._on = mean < bound if self._below else mean > bound
        if not self._on:
            return None
        beside = f" ({self._limit:g} of its start)" if self._of_start else ""
        compared = "below" if self._below else "above"
        return f"{self._metric} {mean:.3g}, mean of {len(self._values)} updates, {compared} {limit:.3g}{beside}"


class MissingTerms:
    """Alarm while a term of the reward that had a value has had none for some updates in which answers were scored."""

    name = "missing_term"
    meaning = "a term of the reward is no longer computed, so it teaches nothing: look at verifier and tasks"
    lasting = True

    def __init__(self, updates: int):
        self._updates = updates
        self._without: dict[str, int] = {}  # updates since a term had a value

    def observe(self, row: Row) -> str | None:
        """Return the names of the terms."""
        for term in [key for key in row if key.startswith("reward_term/")]:
            self._without[term] = -1
        if "reward" in row:
            self._without = {term: count + 1 for term, count in self._without.items()}
        missing = sorted(term for term, count in self._without.items() if count >= self._updates)
        return f"no {' or '.join(missing)} for {self._updates} updates" if missing else None
