"""A list of runs: where each stands, its last figures, age and size. Of each only the ends of its logs are read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from axlearn_like.run.object_store import local_path
from mesh.errors import UserError
from tools.report.load import Run, is_run, number, parse_rows, read_part, read_report
from tools.watch.standing import Standing, standing, tail

_DEPTH = 3  # folders of folders of runs: runs/sweep/seed0
_FIGURES = ("reward", "loss")


@dataclass(frozen=True)
class Listed:
    """A run, and how it stands."""

    path: Path
    standing: Standing

    @property
    def figure(self) -> tuple[str, float] | None:
        """The last reward, or else the last loss."""
        row = self.standing.row
        found = ((name, number(row.get(name))) for name in _FIGURES)
        return next(((name, value) for name, value in found if value is not None), None)

    def size(self) -> int:
        """Return the bytes of all files; a file of several names (checkpoints that are kept twice) counts once."""
        found = {(s.st_dev, s.st_ino): s.st_size for s in _stats(self.path)}
        return sum(found.values())


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the run directories in a folder, and in folders of it that are no runs; or it itself if it is one.

    Raises:
        UserError: there is no such folder.
    """
    root = local_path(folder, "DIR")
    if not root.is_dir():
        raise UserError(f"{root}: no such directory; expected one that holds run directories")
    return sorted(_runs(root, _DEPTH))


def read_standing(path: Path) -> Standing:
    """Return how a run stands, by the ends of its logs."""
    try:
        return standing(read_ends(path))
    except OSError as error:
        return Standing("unreadable", error.strerror or str(error), "", None, None, {}, None)


def listed(paths: list[Path]) -> list[Listed]:
    """Return the runs, those with the latest sign of life first."""
    found = [Listed(path, read_standing(path)) for path in paths]
    return sorted(found, key=lambda one: (-(one.standing.seen or 0.0), one.path))


def read_ends(path: Path) -> Run:
    """Return a run of which only the last rows are read."""
    notes: list[str] = []
    lines = [line for part in ("warm_start", ".") for line in tail(path / part / "metrics.jsonl", 1 << 16)[-2:]]
    return Run(
        path,
        config=read_part(path / "config.txt", notes),
        metrics=parse_rows("metrics.jsonl", lines, notes),
        events=parse_rows("events.jsonl", tail(path / "events.jsonl", 1 << 13), notes),
        report=read_report(path / "report.json", notes),
        notes=notes,
    )


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        try:
            children = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return
        for child in children:
            if not child.name.startswith("."):
                yield from _runs(Path(child.path), depth - 1)


def _stats(folder: str | Path) -> Iterator[os.stat_result]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _stats(entry.path)
        elif not entry.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # a checkpoint was removed
                yield entry.stat(follow_symlinks=False)
