"""The report of a run: one self-contained HTML file, and tables for the terminal.

``load`` reads a run directory, ``svg`` draws plots, ``charts`` makes the figures of a run,
``html`` the page and ``table`` the terminal's tables.
"""

import os
from pathlib import Path

from mesh.errors import UserError
from mesh.files.written import replace_file
from tools.report.load import Run, load_run


def write_report(run: Run | str | os.PathLike[str], output: Path | None = None) -> Path:
    """Write the page of a run, replacing an older one atomically.

    Args:
        run: A loaded run or the path of a run directory. The run may still be under way.
        output: Where to write; ``report.html`` in the run directory if None.

    Returns:
        The path of the page.

    Raises:
        UserError: The path is no run directory, or the page cannot be written.
    """
    from tools.report.html import render  # imports jax, which lists of runs do without

    loaded = run if isinstance(run, Run) else load_run(run)
    target = output or loaded.path / "report.html"
    try:
        replace_file(target, render(loaded))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{target}: cannot write the report: {reason}; choose another place by --output") from error
    return target


__all__ = ["Run", "load_run", "write_report"]
