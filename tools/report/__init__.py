"""The report of a run: one self-contained HTML file and the tables that the terminal shows.

``load`` reads a run directory, ``svg`` draws plots, ``charts`` makes the figures of a run,
``html`` the page and ``table`` the terminal's tables.
"""

from __future__ import annotations

import os
from pathlib import Path

from mesh.errors import UserError
from tools.report.html import render
from tools.report.load import Run, load_run


def write_report(run: Run | str | os.PathLike[str]) -> Path:
    """Writes ``report.html`` into a run directory, replacing an older one atomically.

    Args:
        run: A loaded run or the path of a run directory. The run may be still under way.

    Returns:
        The path of the page.

    Raises:
        UserError: The path is no run directory, or the page cannot be written.
    """
    loaded = run if isinstance(run, Run) else load_run(run)
    target = loaded.path / "report.html"
    partial = loaded.path / f".report.html.{os.getpid()}"
    try:
        partial.write_text(render(loaded), encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        raise UserError(f"{target}: cannot write the report: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return target


__all__ = ["Run", "load_run", "write_report"]
