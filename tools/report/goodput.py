"""Goodput of a run's training: its time by cause, summed over all its processes."""

from __future__ import annotations

from axlearn_like.operations.goodput import CAUSES, Account, account, account_lines
from tools.report.cards import bars
from tools.report.load import Row, Run, mapping, number
from tools.report.words import duration


def _account(run: Run) -> Account:
    return account(row for row in run.events if _sound(row))


def _sound(row: Row) -> bool:
    """Return whether a row is irrelevant to the time account, or has all fields of its kind."""
    wanted = {"train_begin": ("began", "step"), "goodput": ("since", "step")}.get(str(row.get("event")), ())
    causes = mapping(row.get("causes")).values()
    return all(number(value) is not None for value in (*(row.get(name) for name in wanted), *causes)) and (
        row.get("event") != "goodput" or bool(causes)
    )


def told(run: Run) -> str:
    """Return the terminal's table; empty if the run has no time account."""
    return "\n".join(account_lines(_account(run)))


def section(run: Run) -> str:
    """Return a card with a bar for each cause; empty if the run has no time account."""
    found = _account(run)
    if not found.total:
        return ""
    shares = found.shares()
    sizes = {CAUSES[cause]: (one, f"{duration(found.seconds[cause])}, {one:.1%}") for cause, one in shares.items()}
    plural = "es" if found.sessions != 1 else ""
    note = f"{duration(found.total)} in {found.sessions} process{plural}"
    return bars(f"Goodput {shares.get('step', 0.0):.1%}", note, sizes)
