"""The run directory of a trainer of one or more processes: the first opens it, and looks if the run has ended."""

import sys
from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.reader import verify_latest
from axlearn_like.checkpoint.versions import CheckpointError, list_steps
from axlearn_like.operations.goodput import ACCOUNTED, account, account_lines
from axlearn_like.run.directory import RunDirectory, RunDirectoryError
from axlearn_like.run.metrics import read_rows
from mesh.distributed import ProcessGroup


def open_in_all(path: str | Path, text: str, group: ProcessGroup, *, force: bool) -> RunDirectory:
    """Open and lock the directory in the first process; an error there is raised in all.

    `text`, `force`: see `RunDirectory.open`.
    """
    error: RunDirectoryError | None = None
    run = RunDirectory.attach(path)
    if group.leader:
        try:
            run = RunDirectory.open(path, text, force=force)
        except RunDirectoryError as refused:
            error = refused
    message = group.broadcast(None if error is None else str(error))
    if message is not None:
        raise error or RunDirectoryError(message)
    if group.any(not run.config_path.exists()):
        raise RunDirectoryError(f"{path}: not all processes see {run.path}; expected a directory on a common disk")
    return run


def ended_in_all(run: RunDirectory, cfg: Any, group: ProcessGroup, *, show: bool) -> dict[str, Any] | None:
    """Return the last row of a run that has ended, for all processes; None if it goes on."""
    row, error = None, None
    if group.leader:
        try:
            row = None if run.forced else ended_before(run, cfg)
        except CheckpointError as found:
            error = found
    row, message = group.broadcast([row, error and str(error)])
    if message is not None:
        raise error or CheckpointError(message)
    if row is not None and show and group.leader:
        print_account(run)
    return row and {**row, "finished": True, "before": True}


def print_account(run: RunDirectory) -> None:
    """Print where the time of a run went, on stderr."""
    print(*account_lines(account(read_rows(run.events_path, ACCOUNTED))), sep="\n", file=sys.stderr, flush=True)


def ended_before(run: RunDirectory, cfg: Any) -> dict[str, Any] | None:
    """Return the last metrics row of a run whose last checkpoint is saved; None if it goes on.

    Early stopping is asked again, as its rule may have changed.

    Raises:
        CheckpointError: the checkpoint cannot be read, or is damaged.
    """
    ends = read_rows(run.events_path, ("train_begin", "train_end"))
    step = max(list_steps(run.checkpoints), default=None)
    if not ends or step is None or (ends[-1].get("reason"), ends[-1]["step"]) != ("done", step):
        return None
    rows = [row for row in read_rows(run.metrics_path) if row["step"] <= step]
    if step < cfg.num_steps and not (cfg.early_stopping and cfg.early_stopping.build()(rows, before=step)):
        return None
    verify_latest(run.checkpoints)
    return {**(rows[-1] if rows else {}), "step": step}
