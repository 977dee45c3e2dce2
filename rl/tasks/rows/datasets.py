"""Rows of files as tasks, in a line; published datasets by name are in experiments/datasets.py."""

from typing import Any

from rl.tasks.rows.columns import Columns
from rl.tasks.rows.sources import RowFiles
from rl.tasks.rows.task_rows import TaskRows


def rows(files: str | tuple[str, ...], heldout: str | tuple[str, ...] | None = None, **columns: Any) -> TaskRows.Config:
    """Rows of files, with the columns that `columns` name (see `Columns.Config`), or else those of the rows' form."""
    other = None if heldout is None else RowFiles.Config(files=heldout)
    named = Columns.Config(**columns) if columns else None
    return TaskRows.Config(rows=RowFiles.Config(files=files), heldout=other, columns=named)
