"""A list of runs: where each stands, its last figure, age and size. Of each only the ends of its logs are read."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from axlearn_like.run.mirror import fetch_logs
from axlearn_like.run.object_store import local_path
from mesh.errors import UserError, did_you_mean, nearest
from mesh.files.bucket import Bucket, bucket_url
from tools.report.cards import Sheet
from tools.report.load import PARTS, Run, is_run, number, parse_rows, policy_folders, read_part, read_report
from tools.report.words import MISSING, duration, plain
from tools.watch.standing import Standing, standing

_DEPTH = 3  # folders of folders of runs: runs/sweep/seed0
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the run directories in a folder, and in folders of it that are no runs; or it itself if it is one.

    Raises:
        UserError: there is no such folder, or the bucket of a URL cannot be read.
    """
    if (url := bucket_url(folder)) is not None:
        files = [PurePosixPath(name) for name in Bucket(url, "DIR").files()]
        found = {file.parent for file in files if file.name in PARTS}
        outer = {one for one in found if found.isdisjoint(one.parents) and len(one.parts) <= _DEPTH}
        inner = {one for one in found if one.parent.name == "policies" and one.parent.parent in outer}
        return sorted(Path(url, one) for one in outer | inner)
    root = local_path(folder, "DIR")
    if not root.is_dir():
        near = nearest(root.name, [each.name for each in root.parent.glob("*/")])
        found = "is a file" if root.exists() else "no such directory"
        raise UserError(f"{root}: {found}; expected one that holds run directories{did_you_mean(root.name, near)}")
    return sorted(_runs(root, _DEPTH))


def listed(paths: Sequence[Path]) -> list[tuple[Path, Standing]]:
    """Return how runs stand, those with the latest sign of life first."""
    found = [(path, read_standing(path)) for path in paths]
    return sorted(found, key=lambda one: (-(one[1].seen or 0.0), one[0]))


def sheet(found: Sequence[tuple[Path, Standing]], now: float) -> Sheet:
    """Return the list as a table."""
    rows: list[Sequence[str]] = []
    for path, stands in found:
        figures = ((name, number(stands.row.get(name))) for name in ("reward", "loss"))
        last = next((f"{name} {plain(value)}" for name, value in figures if value is not None), MISSING)
        age = stands.age(now)
        seen = MISSING if age is None else f"{duration(age)} ago"
        rows.append(
            (
                bucket_url(path) or str(path),
                stands.words,
                stands.phase,
                stands.progress or MISSING,
                last,
                seen,
                _bytes(size(path)),
            )
        )
    return Sheet("", ("run", "state", "phase", "step", "last", "seen", "size"), rows)


def read_standing(path: Path) -> Standing:
    """Return how a run stands, by the ends of its logs (UserError: the bucket of one cannot be read)."""
    notes: list[str] = []
    if (url := bucket_url(path)) is not None:
        path = fetch_logs(url, lambda name: name.removeprefix("warm_start/") in PARTS)
    try:
        lines = [line for part in ("warm_start", ".") for line in _tail(path / part / "metrics.jsonl", 1 << 16)[-2:]]
        ends = Run(
            path,
            config=read_part(path / "config.txt", notes),
            metrics=parse_rows("metrics.jsonl", lines, notes),
            events=parse_rows("events.jsonl", _tail(path / "events.jsonl", 1 << 13), notes),
            report=read_report(path / "report.json", notes),
        )
        return standing(ends)
    except OSError as error:
        return Standing("unreadable", error.strerror or str(error), "", None, None, {}, None)


def size(folder: str | Path) -> int:
    """Return the bytes of all files; a file of several names (a checkpoint that is kept twice) counts once.

    In a bucket each of them is a file of its own.
    """
    if (url := bucket_url(folder)) is not None:
        return sum(nbytes for nbytes, _ in Bucket(url, "DIR").files().values())
    return sum({(found.st_dev, found.st_ino): found.st_size for found in _stats(folder)}.values())


def _bytes(count: float) -> str:
    power = next((n for n in range(len(_UNITS)) if count < 1000 ** (n + 1)), len(_UNITS) - 1)
    return f"{count / 1000**power:.3g} {_UNITS[power]}"


def _tail(path: Path, most: int) -> list[bytes]:
    """Return the last whole lines of a regular file, of at most so many bytes; none if it is missing or a link."""
    if path.is_symlink() or not path.is_file():
        return []
    with open(path, "rb") as file:
        whole = file.seek(0, 2)
        file.seek(max(0, whole - most))
        return file.read(most).split(b"\n")[whole > most : -1]


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield from (folder, *policy_folders(folder))
    elif depth:
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    yield from _runs(Path(entry.path), depth - 1)


def _stats(folder: str | Path) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError):  # a checkpoint may be removed just now
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                yield from _stats(entry.path)
            elif not entry.is_symlink():
                yield entry.stat(follow_symlinks=False)
