"""Cards of the page that are no pictures: tables, which the terminal shows too, and bars."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from axlearn_like.run.progress import one_line
from mesh.errors import printable

# Colours of first words in the terminal: states of runs, verdicts on invariants.
STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow", "holds": "green", "unknown": "yellow"}
STYLES |= dict.fromkeys(("died", "silent", "unreadable", "broken"), "red")


class Sheet(NamedTuple):
    """A table of texts, for the terminal or the page; columns `numeric` are set to the right."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[int] = ()

    def terminal(self, most: int | None = None) -> Table:
        """Return it for ``rich``; `most`: characters of a cell, which is one line then."""
        made = Table(title=self.title or None, title_justify="left", box=None, pad_edge=False)
        for at, head in enumerate(self.heads):
            made.add_column(Text(head), overflow="fold", justify="right" if at in self.numeric else "left")
        for row in self.rows:
            cells = (printable(cell) if most is None else one_line(cell, most) for cell in row)
            made.add_row(*(Text(cell, STYLES.get(cell.partition(" ")[0], "")) for cell in cells))
        return made

    def card(self, below: str = "") -> str:
        """Return it as a card with markup below; an empty string without rows."""
        if not self.rows:
            return ""
        head, body = self._line("th", self.heads), "".join(f"<tr>{self._line('td', row)}</tr>" for row in self.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div class="card scroll"><h3>{escape(self.title)}</h3>{table}{below}</div>'

    def _line(self, tag: str, cells: Sequence[str]) -> str:
        marked = ((" class=num" if at in self.numeric else "", escape(cell)) for at, cell in enumerate(cells))
        return "".join(f"<{tag}{kind}>{cell.replace('\n', '<br>')}</{tag}>" for kind, cell in marked)


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
