"""Steps between checkpoints by what a save costs and how often the run fails."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

INTERVAL_EVENTS = ("train_begin", "goodput", "saved", "train_end")  # events of a run that an interval follows from
SAVE_EVERY = 100  # steps between saves where none are set and no failure asks for more


class SaveInterval(NamedTuple):
    """An interval and what it follows from."""

    steps: int  # steps between saves
    save_s: float  # seconds that a save keeps the training waiting
    mtbf_s: float  # mean seconds between failures


def best_seconds(save_s: float, mtbf_s: float) -> float:
    """Return the seconds between saves that cost the least time, of saves and of what is made again.

    Young (1974), https://doi.org/10.1145/361147.361115; the first order of Daly (2006),
    https://doi.org/10.1016/j.future.2004.11.016.

    >>> from axlearn_like.checkpoint.interval import best_seconds
    >>> best_seconds(save_s=2.0, mtbf_s=3600.0)
    120.0
    """
    return math.sqrt(2 * save_s * mtbf_s)


def chosen_interval(events: Iterable[Mapping[str, Any]]) -> SaveInterval | None:
    """Return the interval by the trainer's events so far; None: nothing has failed yet, or nothing was saved.

    A failure is a start of the trainer that follows another without its end, `train_end`.
    """
    rows = [row for row in events if row.get("role") == "trainer" and row["event"] in INTERVAL_EVENTS]
    marks = [row["event"] for row in rows if row["event"] in ("train_begin", "train_end")]
    failures = sum(pair == ("train_begin", "train_begin") for pair in zip(marks, marks[1:], strict=False))
    spans = [row for row in rows if row["event"] == "goodput"]
    saves, steps = sum(row["event"] == "saved" for row in rows), sum(row["step"] - row["since"] for row in spans)
    if not (failures and saves and steps > 0):
        return None
    saving = sum(row["causes"].get("checkpoint", 0.0) for row in spans)
    step_s = sum(row["causes"].get(cause, 0.0) for row in spans for cause in ("step", "input")) / steps
    save_s, mtbf_s = saving / saves, (rows[-1]["time"] - rows[0]["time"]) / failures
    every = round(best_seconds(save_s, mtbf_s) / step_s) if step_s > 0 else SAVE_EVERY
    return SaveInterval(max(1, every), round(save_s, 4), round(mtbf_s, 1))
