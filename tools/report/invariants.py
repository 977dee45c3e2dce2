"""The invariants of a run, which must hold whatever was killed, as tables of the page and of the terminal."""

from __future__ import annotations

from html import escape

from rich import box
from rich.table import Table
from rich.text import Text

from rl.audit.invariants import Finding, check_run
from tools.report.load import Run

_SHOWN = 5  # lines of details for each broken invariant


def findings(run: Run) -> list[Finding]:
    """Return the checked invariants of an RL run; none for other runs, or if the log cannot be checked."""
    if not run.rows("rl") or not run.events:
        return []
    try:
        return check_run(run.path)
    except (KeyError, TypeError) as error:
        what = f"the log cannot be checked: {type(error).__name__}: {error}"
        return [Finding("invariants", 0, (), what)]


def words(finding: Finding) -> list[str]:
    """Return the details of a violation, or of what could not be checked; empty if the invariant holds."""
    more = len(finding.broken) - _SHOWN
    lines = [*finding.broken[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return lines + ([f"not checked: {finding.unchecked}"] if finding.unchecked else [])


def verdict(finding: Finding) -> str:
    """Return the verdict in one word."""
    if finding.broken:
        return "broken"
    return "holds" if finding.checked else "unknown"


def section(run: Run) -> str:
    """Return the page's table."""
    rows = "".join(
        f"<tr><td>{escape(finding.invariant)}</td><td>{verdict(finding)}</td><td class=num>{finding.checked}</td>"
        f"<td>{'<br>'.join(map(escape, words(finding)))}</td></tr>"
        for finding in findings(run)
    )
    if not rows:
        return ""
    heads = "<th>what must hold</th><th></th><th class=num>facts</th><th></th>"
    return (
        f'<div class="card scroll"><h3>Invariants</h3><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


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
        text = Text("\n".join(words(finding)))
        made.add_row(Text(finding.invariant), Text(word, style=styles[word]), str(finding.checked), text)
    return made
