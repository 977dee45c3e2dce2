"""Timed spans in the event log: what the timeline of a report is drawn from."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from axlearn_like.run.directory import EventLog


@contextmanager
def span(events: EventLog, role: str, event: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Time a block and log it with its `seconds` when it ends well; the yielded dict takes further fields."""
    began = time.monotonic()
    yield fields
    events.append(role, event, seconds=round(time.monotonic() - began, 4), **fields)
