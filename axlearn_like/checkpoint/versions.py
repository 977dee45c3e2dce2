"""Names of saved weights: `RUN` (the newest), `RUN@best`, `RUN@6`, or the path of a checkpoint or of a folder of them.

Every command, config and function that takes the weights of a run takes these names, and finds them here.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from axlearn_like.run.object_store import fetched, local_path
from mesh.errors import UserError, did_you_mean, nearest
from mesh.files.bounded import BoundsError, read_json
from mesh.files.bucket import bucket_url

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
    """Return the path in a name, and what stands behind its `@`; None: nothing does. A path that exists has none.

    Of a URL what it means is fetched, and the path is that of the copy (UserError: it cannot be).
    """
    before, at, which = os.fspath(name).rpartition("@")
    versioned = bool(at) and (which == BEST or which.isdecimal())
    if bucket_url(name):
        base, version = (before, which) if versioned else (name, None)
        return fetched(base, "path", version=version), version
    path = local_path(name, "path")
    if not versioned or path.exists():
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
                    step = _best_of(folder, steps) if folder.name == BEST else steps[-1]
                    return SavedWeights(folder / str(step), 0 if folder == path / _PLACES[-1] else step)
        elif found := _named(_own(path, folders), which):
            return found
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read ({type(error).__name__}: {error})") from error
    if which is None and (path.name == BEST or path.name.isdecimal()) and not path.exists():
        folders = list(_folders(path.parent))  # a path spelled as those that are there
    raise NoCheckpoint(_none(path, which, folders if which is None else _own(path, folders)))


def label(name: str | Path, run: Path, weights: SavedWeights | None) -> str:
    """Return the name of a run for people and clients: with `@STEP` where `name` means one version of it."""
    path, which = split_version(name)  # copy of what a URL means
    if weights is None or (which is None and path.absolute() == run.absolute()):
        return run.name
    return f"{run.name}@{weights.version}"


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


def _named(folders: list[Path], which: str) -> SavedWeights | None:
    """Return the version ("best" or a step) in the first of these folders that has it."""
    for folder in folders:
        step = _best(folder) if which == BEST else int(which)
        for path in (folder / BEST / str(step),) if which == BEST else (folder / which, folder / BEST / which):
            if step is not None and (path / PARAMS).is_dir():
                return SavedWeights(path, step)
    return None


def _own(path: Path, folders: list[Path]) -> list[Path]:
    """Return the folders whose steps are those of the run at `path`: not those of the supervised phase before RL.

    `RUN/warm_start@90` names one of these; were `RUN@90` one too, it would stand for update 90 of RL once that is gone.
    """
    return [folder for folder in folders if folder != path / _PLACES[-1]]


def _best_of(folder: Path, steps: list[int]) -> int:
    """Return the best of the steps in a folder `best`. CheckpointError: its index does not say which it is."""
    best = _best(folder.parent)
    if best in steps or len(steps) == 1:
        return best if best in steps else steps[0]
    raise NoCheckpoint(f"{folder / 'best.json'} does not say which of {_listed(steps)} is best; name one by its path")


def _best(folder: Path) -> int | None:
    """Return the best step of a folder by its index, None if none is kept."""
    try:
        kept = read_json(folder / BEST / "best.json")["steps"]
        return int(next(iter(kept)))
    except (FileNotFoundError, NotADirectoryError, BoundsError, StopIteration, ValueError, LookupError, TypeError):
        return None


def _none(path: Path, which: str | None, folders: list[Path]) -> str:
    """Return the message that names what was asked for, and what there is."""
    there: list[str] = []
    for folder in folders:
        steps, kept = list_steps(folder), list_steps(folder / BEST)
        there += [f"{folder} has {_listed(steps)}"] if steps else []
        there += [f"{folder / BEST} has {_listed(kept)}"] if kept else []
    asked = path if which is None else f"{path}@{which}"
    number = which if which is not None else path.name
    known = {step for folder in folders for step in (*list_steps(folder), *list_steps(folder / BEST))}
    if number.isdecimal() and known:
        there.append(f"the nearest step is {min(known, key=lambda step: abs(step - int(number)))}")
    if there:
        return f"{asked} is no checkpoint: {'; '.join(there)}. Name one as RUN, RUN@best, RUN@STEP or by its path"
    near = [] if path.exists() else nearest(path.name, [each.name for each in path.parent.glob("*/")])
    expected = "a run directory, RUN@best, RUN@STEP, its checkpoints, or one step"
    return f"{asked} holds no checkpoint; expected {expected}{did_you_mean(path.name, near)}"


def _listed(steps: list[int]) -> str:
    shown = [*map(str, steps[:3]), "...", *map(str, steps[-3:])] if len(steps) > 8 else map(str, steps)
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(shown)}"
