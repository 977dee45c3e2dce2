"""The invariants of a run, which must hold whatever was killed, as tables of the page and of the terminal."""

from __future__ import annotations

from html import escape

from rich import box
from rich.table import Table
from rich.text import Text

from mesh.errors import printable
from rl.audit.invariants import Finding, check_run
from tools.report import cards
from tools.report.load import Run

_SHOWN = 5  # lines of details for each broken invariant


def findings(run: Run) -> list[Finding]:
    """Return the checked invariants of an RL run; none for other runs."""
    if not run.rows("rl") or not run.events:
        return []
    return check_run(run.path)


def words(finding: Finding) -> list[str]:
    """Return the details of a violation, or of what could not be checked; empty if the invariant holds."""
    more = len(finding.broken) - _SHOWN
    lines = [*finding.broken[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    if finding.unchecked:
        return [*lines, f"not checked: {finding.unchecked}"]
    return lines if lines or finding.checked else ["this run has no fact that it could break: nothing to check"]


def verdict(finding: Finding) -> str:
    """Return the verdict in one word."""
    if finding.broken:
        return "broken"
    return "holds" if finding.checked else "unknown"


def section(run: Run) -> str:
    """Return the page's table."""
    rows = [
        [escape(one.invariant), verdict(one), str(one.checked), "<br>".join(map(escape, words(one)))]
        for one in findings(run)
    ]
    return cards.table_card("Invariants", cards.table(("what must hold", "", "facts", ""), rows, numeric=(2,)))


def table(found: list[Finding]) -> Table:
    """Return the terminal's table."""
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("what must hold")
    made.add_column("")
    made.add_column("facts", justify="right")
    made.add_column("")
    styles = {"broken": "red", "holds": "green", "unknown": "yellow"}
    for finding in found:
        word = verdict(finding)
        text = Text(printable("\n".join(words(finding))))
        made.add_row(Text(finding.invariant), Text(word, style=styles[word]), str(finding.checked), text)
    return made
