"""A small chart maker: scales, nice ticks and one plot area, drawn as inline SVG without scripts.

Colours are classes (``c1`` ... ``c8``, ``muted``, ``accent``) that the page's style sheet
resolves for light and dark, so a figure is drawn once for both. Values that come from a run are
escaped here and nowhere else.

Not matplotlib (3.11.2, the reward curve of 320 steps, 2026-11-22): 1.2 CPU seconds to import; 271 kB and 1.1 s for two
widths and two themes, without tooltips, since its SVG has fixed colours. Here 30 kB and 0.02 s, with 107 tooltips.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]


def _attribute(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return html.escape(str(value), quote=True)


def element(tag: str, body: str = "", **attributes: object) -> str:
    """Return one element; ``body`` is markup. ``class_`` is ``class``, other underscores are hyphens."""
    names = {name: "class" if name == "class_" else name.replace("_", "-") for name in attributes}
    inner = "".join(f' {names[name]}="{_attribute(value)}"' for name, value in attributes.items())
    return f"<{tag}{inner}>{body}</{tag}>" if body else f"<{tag}{inner}/>"


def title(text: str) -> str:
    """Return the tooltip of the element that holds it."""
    return f"<title>{html.escape(text)}</title>"


def text(x: float, y: float, words: str, **attributes: object) -> str:
    """Return a line of text, escaped."""
    return element("text", html.escape(words) or " ", x=x, y=y, **attributes)


def nice_ticks(lo: float, hi: float, count: int) -> list[float]:
    """Return about ``count`` round numbers within [lo, hi], 1, 2, 2.5 or 5 times a power of ten apart."""
    if not hi > lo:
        return [lo]
    rough = (hi - lo) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * unit for unit in (1, 2, 2.5, 5, 10) if power * unit >= rough * 0.999)
    first, last = math.ceil(lo / step - 1e-9), math.floor(hi / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(lo: float, hi: float, count: int) -> list[float]:
    """Return powers of ten within [lo, hi], thinned to about ``count``."""
    first, last = math.ceil(math.log10(lo) - 1e-9), math.floor(math.log10(hi) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / max(count, 1)))
    return [10.0**power for power in range(first, last + 1, stride)]


def time_ticks(lo: float, hi: float, count: int) -> list[float]:
    """Return about ``count`` times in seconds within [lo, hi], at a spacing usual for clocks."""
    rough = (hi - lo) / max(count, 1)
    if rough < 1:
        return nice_ticks(lo, hi, count)
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200)
    step = next((step for step in steps if step >= rough), 86400 * math.ceil(rough / 86400))
    return [float(step * index) for index in range(math.ceil(lo / step), math.floor(hi / step) + 1)]


def number_label(value: float) -> str:
    """Return a short tick label: ``0.25``, ``1.5k``, ``2M``, ``5e-5``."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    if value and abs(value) < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{value:.4g}" if value else "0"


def power_label(value: float) -> str:
    """Return a power of ten with a raised exponent."""
    raised = str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}"


def percent_label(value: float) -> str:
    """Return a fraction in per cent."""
    return f"{100 * value:.4g} %"


def time_label(value: float) -> str:
    """Return seconds since the start as ``45 s``, ``4 min`` or ``4:30``."""
    if value < 60 or value % 1:
        return f"{value:.4g} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes}:{seconds:02d}" if seconds else f"{minutes} min"


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from [lo, hi] to pixels in [start, end]; values outside are clamped."""

    lo: float
    hi: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        value = min(max(value, self.lo), self.hi)
        if self.log:
            share = math.log(value / self.lo) / math.log(self.hi / self.lo)
        else:
            share = (value - self.lo) / (self.hi - self.lo)
        return self.start + share * (self.end - self.start)


def limits(values: Sequence[float], *, zero: bool = False, log: bool = False) -> tuple[float, float]:
    """Return a range that holds all values with a margin, from zero on request; whole decades if log."""
    if log:
        positive = [value for value in values if value > 0] or [1.0]
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        return 10.0**low, 10.0 ** max(high, low + 1)
    low, high = min(values, default=0.0), max(values, default=1.0)
    if zero:
        low = min(low, 0.0)
    air = 0.08 * (high - low) or 0.08 * abs(high) or 1.0
    return (low if zero and low == 0 else low - air), high + air


class Plot:
    """A plot area with axes. Marks are drawn in the order of the calls, over the grid."""

    def __init__(
        self,
        width: int,
        height: int,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        name: str,
        labels: tuple[str, str] = ("", ""),
        log: bool = False,
        y_format: Callable[[float], str] = number_label,
    ) -> None:
        self.width, self.height, self.name = width, height, name
        self.left, self.right, self.top, self.bottom = 46, width - 12, 26, height - 34
        self.x = Scale(*_wide(x), self.left, self.right)
        self.y = Scale(*_wide(y), self.bottom, self.top, log)
        self.parts: list[str] = []
        y_format = power_label if log else y_format
        for tick in (log_ticks if log else nice_ticks)(self.y.lo, self.y.hi, max(3, height // 52)):
            row, style = self.y(tick), "grid" if tick else "axis"
            self.add(element("path", d=f"M{self.left} {row:.1f}H{self.right}", class_=style))
            self.add(text(self.left - 8, row + 4, y_format(tick), text_anchor="end", class_="tick"))
        for tick in nice_ticks(self.x.lo, self.x.hi, max(3, width // 72)):
            words = number_label(tick)
            self.add(text(self.x(tick), self.bottom + 17, words, text_anchor="middle", class_="tick"))
        self.add(element("path", d=f"M{self.left} {self.bottom}H{self.right}", class_="axis"))
        x_label, y_label = labels
        if y_label:
            self.add(text(2, 13, y_label, class_="unit"))
        if x_label:
            self.add(text(self.right, self.height - 3, x_label, text_anchor="end", class_="unit"))

    def add(self, *parts: str) -> None:
        """Add markup over everything drawn so far."""
        self.parts.extend(parts)

    def line(self, points: Sequence[Point], style: str) -> None:
        """Draw a line through the points; a single point becomes a dot."""
        if len(points) == 1:
            self.dots(points, style, radius=3)
        elif points:
            path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
            self.add(element("path", d=f"M{path}", class_=f"line {style}"))

    def dots(self, points: Sequence[Point], style: str, radius: float = 1.8) -> None:
        """Draw one small disc per point, as a single path of round caps to keep the file small."""
        if points:
            path = "".join(f"M{self.x(x):.1f} {self.y(y):.1f}h0" for x, y in points)
            self.add(element("path", d=path, class_=f"dots {style}", stroke_width=2 * radius))

    def rule(self, x: float, style: str, tip: str, words: str = "", before: bool = False) -> None:
        """Draw a vertical line with a tooltip and, if there are words, a label right of its top."""
        column = self.x(x)
        drawn = element("path", d=f"M{column:.1f} {self.top - 6}V{self.bottom}", class_=f"rule {style}")
        wide = element("path", d=f"M{column:.1f} {self.top - 6}V{self.bottom}", class_="catch")
        if words:
            side = -5 if before else 5
            anchor = "end" if before else "start"
            drawn += text(column + side, self.top, words, text_anchor=anchor, class_=f"mark {style}")
        self.add(element("g", title(tip) + drawn + wide))

    def hover(self, tips: Sequence[tuple[float, str]]) -> None:
        """Add columns that show their values on hover: (x, text), ascending in x."""
        columns = [self.x(x) for x, _ in tips]
        if len(columns) < 2:
            edges = [self.left, self.right]
        else:
            middles = [(a + b) / 2 for a, b in zip(columns, columns[1:], strict=False)]
            edges = [self.left, *middles, self.right]
        height = self.bottom - self.top
        for (_, words), start, end in zip(tips, edges, edges[1:], strict=False):
            size = max(float(end) - float(start), 0.1)
            self.add(element("rect", title(words), x=float(start), y=self.top, width=size, height=height, class_="hit"))

    def render(self) -> str:
        """Return the finished ``<svg>``."""
        return picture(self.width, self.height, self.name, "".join(self.parts))


def picture(width: int, height: float, name: str, body: str) -> str:
    """Return an ``<svg>`` that scales to its container's width."""
    box = f"0 0 {width} {height:g}"
    return element("svg", body, viewBox=box, role="img", aria_label=name, width=width, height=height)


def _wide(span: tuple[float, float]) -> tuple[float, float]:
    """Return a range of nonzero width, so that a scale never divides by zero."""
    return span if span[1] > span[0] else (span[0], span[0] + 1.0)
