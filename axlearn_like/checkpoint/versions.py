"""Names of saved weights: `RUN` (the newest), `RUN@best`, `RUN@6`, or the path of a checkpoint or of a folder of them.

Every command, config and function that takes the weights of a run takes these names, and finds them here.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import UserError

BEST, PARAMS = "best", "params"
# Where a run may have checkpoints: of RL, of supervised training, of the supervised phase before RL.
_PLACES = ("checkpoints/rl", "checkpoints", "warm_start/checkpoints")


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, of another model, or could not be written."""


class NoCheckpoint(CheckpointError):
    """No checkpoint has this name."""


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """The directory of a checkpoint, and the number of updates that made it: 0 for what RL begins with."""

    path: Path
    version: int


def split_version(name: str | Path) -> tuple[Path, str | None]:
    """Return the path in a name, and what stands behind its `@`; None: nothing does. A path that exists has none."""
    path, text = Path(name).expanduser(), os.fspath(name)
    before, at, which = text.rpartition("@")
    if not at or path.exists() or not (which == BEST or which.isdecimal()):
        return path, None
    return Path(before).expanduser(), which


def find_version(name: str | Path) -> SavedWeights:
    """Return the checkpoint that a name means.

    A path may be that of a run, of its `checkpoints`, of a folder in it such as `rl` or `best`, or of one step.

    Raises:
        NoCheckpoint: there is none; lists those that there are. Another one never takes its place.
    """
    path, which = split_version(name)
    path = path.absolute()
    try:
        if which is None and (path / PARAMS).is_dir():
            return SavedWeights(path, int(path.name) if path.name.isdecimal() else 0)
        folders = list(_folders(path))
        if which is None:
            for folder in folders:
                if steps := list_steps(folder):
                    best = _best(folder.parent) if folder.name == BEST else None
                    step = steps[-1] if best not in steps else best
                    return SavedWeights(folder / str(step), 0 if folder == path / _PLACES[-1] else step)
        elif which == BEST:
            for folder in folders:
                best = _best(folder)
                if best is not None and (folder / BEST / str(best) / PARAMS).is_dir():
                    return SavedWeights(folder / BEST / str(best), best)
        else:
            for folder in folders:
                for step in (folder / which, folder / BEST / which):
                    if (step / PARAMS).is_dir():
                        return SavedWeights(step, int(which))
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read ({type(error).__name__}: {error})") from error
    raise NoCheckpoint(_none(path, which, folders))


def list_steps(directory: Path) -> list[int]:
    """Return the steps of completed checkpoints, oldest first. CheckpointError: the folder cannot be listed."""
    try:
        return sorted(int(entry.name) for entry in os.scandir(directory) if entry.name.isdecimal() and entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoints {directory} cannot be listed ({type(error).__name__}: {error})") from error


def _folders(path: Path) -> Iterator[Path]:
    """Yield the folders of checkpoints that a path means, those of the newest phase first."""
    if any((path / place).is_dir() for place in _PLACES):
        yield from (path / place for place in _PLACES)
    else:
        yield from (path / "rl", path)


def _best(folder: Path) -> int | None:
    """Return the best step of a folder by its index, None if none is kept."""
    try:
        kept = json.loads((folder / BEST / "best.json").read_text())["steps"]
        return int(next(iter(kept)))
    except (FileNotFoundError, NotADirectoryError, StopIteration, ValueError, LookupError, TypeError):
        return None


def _none(path: Path, which: str | None, folders: list[Path]) -> str:
    """Return the message that names what was asked for, and what there is."""
    there: list[str] = []
    for folder in folders:
        steps, kept = list_steps(folder), list_steps(folder / BEST)
        there += [f"{folder} has {_listed(steps)}"] if steps else []
        there += [f"{folder / BEST} has {_listed(kept)}"] if kept else []
    asked = path if which is None else f"{path}@{which}"
    if there:
        return f"{asked} is no checkpoint: {'; '.join(there)}. Name one as RUN, RUN@best, RUN@STEP or by its path"
    return f"{asked} holds no checkpoint; expected a run directory, RUN@best, RUN@STEP, its checkpoints, or one step"


def _listed(steps: list[int]) -> str:
    shown = [*map(str, steps[:3]), "...", *map(str, steps[-3:])] if len(steps) > 8 else map(str, steps)
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(shown)}"
