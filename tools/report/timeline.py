"""The timeline of each role's work over the whole run.

A step is often narrower than a pixel: each lane shows the *share* of the time of each kind of work, in few pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tools.report import svg
from tools.report.charts import FULL, figure
from tools.report.load import Outage, Run, number
from tools.report.words import duration, label

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


_BIN = 3  # pixels


class _Lanes:
    """A picture with one lane per role over a window of time."""

    def __init__(self, run: Run, roles: dict[str, list[Span]], start: float, end: float) -> None:
        self.run, self.start, self.end = run, start, max(end, start + 1e-3)
        self.left, self.pitch, self.bar = 138, 40, 26
        self.width, self.top = FULL, 34
        self.height = self.top + self.pitch * len(roles) + 48
        self.x = svg.Scale(self.start, self.end, self.left, FULL - 10)
        self.rows = {role: self.top + self.pitch * index + 4 for index, role in enumerate(roles)}
        self.parts: list[str] = []
        for role, spans in roles.items():
            row = self.rows[role]
            share = f"{100 * busy(spans, self.start, self.end):.0f} % busy" if spans else _lives(run, role)
            self.parts.append(self.box(self.start, self.end, row, "lane"))
            self.parts.append(svg.text(2, row + 12, role, class_="name"))
            self.parts.append(svg.text(2, row + 26, share, class_="tick"))
        origin = run.start
        for tick in svg.time_ticks(self.start - origin, self.end - origin, 10):
            column, foot = self.x(tick + origin), self.height - 42
            self.parts.append(svg.element("path", d=f"M{column:.1f} {self.top}V{foot}", class_="grid"))
            words = svg.time_label(tick)
            self.parts.append(svg.text(column, self.height - 26, words, text_anchor="middle", class_="tick"))
        self._versions()

    def _versions(self) -> None:
        """Draw a row below the times: versions of the weights where they were published, as many as fit."""
        reached = self.left - 1.0
        for time, version in versions(self.run, self.start, self.end):
            column, words = self.x(time), f"v{version}"
            if column - 4 * len(words) < reached or column + 4 * len(words) > self.width:
                continue
            reached = column + 4 * len(words) + 14
            tip = svg.title(f"version {version} published {duration(time - self.run.start)} after the start")
            mark = svg.element("path", d=f"M{column:.1f} {self.height - 18}v5", class_="grid")
            drawn = svg.text(column, self.height - 3, words, text_anchor="middle", class_="tick")
            self.parts.append(svg.element("g", tip + mark + drawn))

    def box(self, start: float, end: float, row: float, style: str, tip: str = "") -> str:
        """Draw a rectangle of a lane's height from one time to another."""
        left = self.x(start)
        size = max(self.x(end) - left, 0.6)
        body = svg.title(tip) if tip else ""
        return svg.element("rect", body, x=left, y=row, width=size, height=self.bar, class_=style)

    def outages(self) -> None:
        """Draw kills and restarts as lines over all lanes, and the time between them on the role's lane."""
        for outage in self.run.outages:
            self._outage(outage)

    def _outage(self, outage: Outage) -> None:
        back = outage.back if outage.back is not None else self.end
        if outage.killed > self.end or back < self.start:
            return
        seconds = duration(back - outage.killed)
        row = self.rows.get(outage.target)
        if row is not None:
            self.parts.append(self.box(outage.killed, back, row, "outage", f"{outage.target} down for {seconds}"))
        foot = self.height - 42
        for time, style, words in (
            (outage.killed, "kill", "killed"),
            (outage.back, "back", "replaced"),
        ):
            if time is None or not self.start <= time <= self.end:
                continue
            column = self.x(time)
            tip = f"{outage.target} {words} {duration(time - self.run.start)} after the start"
            drawn = svg.element("path", d=f"M{column:.1f} {self.top - 8}V{foot}", class_=f"rule {style}")
            catch = svg.element("path", d=f"M{column:.1f} {self.top - 8}V{foot}", class_="catch")
            self.parts.append(svg.element("g", svg.title(tip) + drawn + catch))

    def render(self, name: str) -> str:
        return svg.picture(self.width, self.height, name, "".join(self.parts))


def _lives(run: Run, role: str) -> str:
    """Return the number of starts of a role that logs no spans, in words."""
    starts = sum(row.get("event") == "start" and row.get("role") == role for row in run.events)
    return f"started {starts} time{'s' * (starts != 1)}"


def _shares(spans: Sequence[Span], start: float, size: float, bins: int) -> dict[str, list[float]]:
    """Return per kind the share of each bin of ``size`` seconds; scaled down where spans overlap."""
    shares = {kind: [0.0] * bins for kind in KINDS if any(span.kind == kind for span in spans)}
    for span in spans:
        first = max(int((span.start - start) / size), 0)
        for at in range(first, min(int((span.end - start) / size) + 1, bins)):
            low = max(span.start, start + at * size)
            shares[span.kind][at] += max(min(span.end, start + (at + 1) * size) - low, 0.0) / size
    for at in range(bins):
        total = sum(values[at] for values in shares.values())
        if total > 1.0:
            for values in shares.values():
                values[at] /= total
    return shares


def _stack(shares: dict[str, list[float]], left: float, row: float, bar: float) -> list[tuple[str, str]]:
    """Draw one path per kind, stacked from the lane's bottom; equal neighbours share a rectangle."""
    bins = len(next(iter(shares.values()), []))
    floor = [0.0] * bins
    paths = []
    for kind, values in shares.items():
        boxes = [(round(row + bar * (1 - floor[at] - values[at]), 1), round(bar * values[at], 1)) for at in range(bins)]
        floor = [low + value for low, value in zip(floor, values, strict=True)]
        path, at = [], 0
        while at < bins:
            end = at + 1
            while end < bins and boxes[end] == boxes[at]:
                end += 1
            top, height = boxes[at]
            if height > 0:
                wide = (end - at) * _BIN
                path.append(f"M{left + at * _BIN:g} {top:g}h{wide}v{height:g}h-{wide}z")
            at = end
        paths.append((kind, "".join(path)))
    return paths


def _key(roles: dict[str, list[Span]]) -> list[tuple[str, str]]:
    kinds = {span.kind for spans in roles.values() for span in spans}
    return [(words, f"box {style}") for kind, (words, style) in KINDS.items() if kind in kinds]


def overview(run: Run) -> str:
    """Return the picture of the whole run; an empty string if the event log has no spans."""
    roles = lanes(run)
    if not any(roles.values()):
        return ""
    end = last_event(run)

    view = _Lanes(run, roles, run.start, end)
    bins = max(int((FULL - 10 - view.left) / _BIN), 1)
    for role, spans in roles.items():
        shares = _shares(spans, view.start, (view.end - view.start) / bins, bins)
        step = (FULL - 10 - view.left) / (bins * _BIN)
        for kind, path in _stack(shares, 0, view.rows[role], view.bar):
            mine = [span.end - span.start for span in spans if span.kind == kind]
            tip = f"{role}, {KINDS[kind][0]}: {duration(sum(mine))} in {len(mine)} spans"
            place = f"translate({view.left} 0) scale({step:.5f} 1)"
            style = f"fill {KINDS[kind][1]}"
            view.parts.append(svg.element("path", svg.title(tip), d=path or "M0 0", transform=place, class_=style))
    for name, begin, finish in phases(run):
        left, right = view.x(begin), view.x(finish)
        path = f"M{left + 1:.1f} {view.top - 8}H{max(right - 2, left + 1):.1f}"
        tip = f"{label(name)}: {duration(finish - begin)}"
        view.parts.append(svg.element("path", svg.title(tip), d=path, class_="whisk muted"))
        choices = (tip, label(name), name.split("_")[0])
        words = next((words for words in choices if 7 * len(words) < right - left), "")
        if words:
            view.parts.append(svg.text(left, view.top - 14, words, class_="value"))
    view.outages()
    picture = view.render("Timeline of all roles over the whole run")

    caption = (
        "Time since the start, below it the versions of the weights as they were published. The height "
        "of a colour is its share of that moment; red is a dead role until its replacement. Good: the "
        "trainer's lane is mostly update during RL, not waiting, and only the dead lane notices the death."
    )
    return figure("Whole run", caption, picture, _key(roles))
