"""The timeline of one program: a sample with its tools and the completions that it has spawned, as bars by lane."""

from typing import Any

from mesh.errors import printable
from tools.report import svg
from tools.report.charts import FULL, figure
from tools.report.load import Run, number
from tools.report.words import duration, plain

_KINDS = {
    "queue": ("waiting for a row", "idle"),
    "draw": ("drawing", "c2"),
    "wait": ("waiting for its environment", "c4"),
    "join": ("waiting for others", "c3"),
}
_TOOL = "c5"
_LEFT, _PITCH, _MOST = 170, 22, 40

Lanes = list[tuple[str, list[tuple[str, float, float]]]]


def latest(run: Run) -> tuple[str, Lanes]:
    """Return where and when the latest program was drawn that the event log has, and its lanes; none: no lanes."""
    for row in reversed(run.events):
        if row.get("event") == "program" and (lanes := _lanes(row.get("lanes"))):
            return f"update {plain(number(row.get('step')))}, {row.get('role')}", lanes
    return "", []


def spent(lanes: Lanes) -> str:
    """Return where the seconds of the sample went, in words."""
    seconds: dict[str, float] = {}
    for name, spans in lanes:
        for kind, began, ended in spans if name == lanes[0][0] or name.endswith(": tools") else ():
            words = "beside it tools" if ": " in name else _style(kind)[0]
            seconds[words] = seconds.get(words, 0.0) + ended - began
    children = sum(name.startswith("child") and ": " not in name for name, _ in lanes)
    parts = [f"{words} {duration(total)}" for words, total in seconds.items()]
    return f"{lanes[0][0]}: {', '.join([*parts, *([f'{children} spawned'] if children else [])])}"


def timeline(run: Run) -> str:
    """Return the picture of the latest program; an empty string if the event log has none."""
    where, lanes = latest(run)
    if not lanes:
        return ""
    end = max(ended for _, spans in lanes[:_MOST] for _, _, ended in spans)
    x, height = svg.Scale(0.0, max(end, 1e-3), _LEFT, FULL - 10), _PITCH * len(lanes[:_MOST]) + 28
    parts: list[str] = []
    for tick in svg.time_ticks(0.0, end, 10):
        parts.append(svg.element("path", d=f"M{x(tick):.1f} 4V{height - 22}", class_="grid"))
        parts.append(svg.text(x(tick), height - 6, svg.time_label(tick), text_anchor="middle", class_="tick"))
    key = dict[tuple[str, str], None]()
    for top, (name, spans) in zip(range(4, height, _PITCH), lanes[:_MOST], strict=False):
        parts.append(svg.text(2, top + 12, name, class_="tick"))
        for kind, began, ended in spans:
            words, style = _style(kind)
            tip = svg.title(f"{name}: {words} for {duration(ended - began)}, from {duration(began)} on")
            box = {"x": x(began), "y": top, "width": max(x(ended) - x(began), 0.8), "height": _PITCH - 6}
            parts.append(svg.element("rect", tip, **box, class_=f"fill {style}"))
            key["a tool" if style == _TOOL else words, f"box {style}"] = None
    more = f" {len(lanes) - _MOST} more lanes are left out." if len(lanes) > _MOST else ""
    caption = f"{spent(lanes)}.{more} Good: tools and children run while the sample draws, and it seldom waits."
    picture = svg.picture(FULL, height, "Timeline of a program", "".join(parts))
    return figure(f"One program ({where})", caption, picture, key)


def _style(kind: str) -> tuple[str, str]:
    return _KINDS.get(kind, (f"tool {kind}", _TOOL))


def _lanes(value: Any) -> Lanes:
    """Return the lanes of an event, as far as they can be drawn."""
    lanes = [lane for lane in value if isinstance(lane, list) and len(lane) == 2] if isinstance(value, list) else []
    found = [(printable(str(name)), _spans(spans)) for name, spans in lanes if isinstance(spans, list)]
    return [(name, spans) for name, spans in found if spans]


def _spans(value: list[Any]) -> list[tuple[str, float, float]]:
    rows = [one for one in value if isinstance(one, list) and len(one) == 3]
    spans = [(printable(str(kind)), number(began), number(ended)) for kind, began, ended in rows]
    return [(kind, low, high) for kind, low, high in spans if low is not None and high is not None and 0 <= low <= high]
