"""The invariants of a run, which must hold whatever was killed, as a table of the page and of the terminal."""

from rl.audit.invariants import Finding, check_run
from tools.report.cards import Sheet
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


def sheet(found: list[Finding]) -> Sheet:
    """Return the table."""
    rows = [(one.invariant, verdict(one), str(one.checked), "\n".join(words(one))) for one in found]
    return Sheet("Invariants", ("what must hold", "", "facts", ""), rows, numeric=(2,))


def section(run: Run) -> str:
    """Return the page's table."""
    return sheet(findings(run)).card()
