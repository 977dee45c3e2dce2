"""Cards of the page that are no pictures: tables and bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

Row = Sequence[str]


def table(heads: Row, rows: Iterable[Row], numeric: Iterable[int] = (), first: str = "") -> str:
    """Return a table of cells in markup; an empty string without rows.

    Args:
        heads: headings of the columns.
        rows: cells.
        numeric: indices of columns of numbers.
        first: class of the first row.
    """
    right = set(numeric)

    def line(tag: str, cells: Row) -> str:
        return "".join(f"<{tag}{' class=num' if at in right else ''}>{one}</{tag}>" for at, one in enumerate(cells))

    body = "".join(
        f"<tr{f' class={first}' if first and not at else ''}>{line('td', row)}</tr>" for at, row in enumerate(rows)
    )
    return f"<table><thead><tr>{line('th', heads)}</tr></thead><tbody>{body}</tbody></table>" if body else ""


def table_card(heading: str, content: str, below: str = "") -> str:
    """Return a card with a table; an empty string without one."""
    return f'<div class="card scroll"><h3>{heading}</h3>{content}{below}</div>' if content else ""


def bars(heading: str, note: str, sizes: dict[str, tuple[float, str]]) -> str:
    """Return a card with a bar for each label, of (size, value in words); an empty string without bars."""
    if not sizes:
        return ""
    most = max(max(size for size, _ in sizes.values()), 1e-9)
    drawn = "".join(
        f'<span>{escape(label)}</span><i style="width:{100 * size / most:.1f}%"></i><b>{words}</b>'
        for label, (size, words) in sizes.items()
    )
    meta = f'<span class="meta">{note}</span>' if note else ""
    return f'<div class="card"><div class="head"><h3>{heading}</h3>{meta}</div><div class="bar">{drawn}</div></div>'
