"""Timelines of programs: where the seconds of a completion went, beside those of its tools and of what it spawned."""

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_MOST = 64  # lanes of a timeline in the event log, and spans of a lane


class Span(NamedTuple):
    """Seconds of one kind, on the monotonic clock."""

    kind: str  # "queue", for a row of the batch; "draw"; "wait", for a future; "join", for others; or a tool's name
    began: float
    ended: float


class Lane(NamedTuple):
    """Spans of one completion ("sample 3", "child 1" and below it "child 1.2"), or of its tools ("sample 3: tools")."""

    name: str
    spans: tuple[Span, ...]


class Timeline:
    """Spans of a completion, one after the other, and those of its tools."""

    def __init__(self) -> None:
        self.spans, self.tools = list[Span](), list[Span]()
        self._kind, self._since = "", 0.0

    def enter(self, kind: str) -> None:
        """End the span so far, and begin one of a kind; "": none."""
        now = time.monotonic()
        if self._kind:
            self.spans.append(Span(self._kind, self._since, now))
        self._kind, self._since = kind, now

    def lanes(self, name: str) -> Iterator[Lane]:
        """Yield the lane of a completion of this name, and that of its tools."""
        yield Lane(name, tuple(self.spans))
        if self.tools:
            yield Lane(f"{name}: tools", tuple(self.tools))


def event_fields(lanes: Iterable[Lane]) -> dict[str, Any] | None:
    """Return the fields of the event of a program; None: the completion did nothing but draw."""
    shown = [lane for lane in lanes if lane.spans][:_MOST]
    if {span.kind for lane in shown for span in lane.spans} <= {"queue", "draw"}:
        return None
    first = min(span.began for lane in shown for span in lane.spans)
    rows = [
        [lane.name, [[kind, round(began - first, 4), round(ended - first, 4)] for kind, began, ended in lane.spans]]
        for lane in (lane._replace(spans=lane.spans[:_MOST]) for lane in shown)
    ]
    return {"lanes": rows}
