"""A run directory as it was before a command: put back if the command is refused before it has got anywhere."""

import contextlib
import os
from pathlib import Path

# Files that a command writes before its first update; `events.jsonl` only grows.
_WRITTEN = ("config.txt", "config_resolved.txt", "data.json", "run.lock", "report.json")
_GROWS = "events.jsonl"
_MADE = ("checkpoints/rl/best/pending", "checkpoints/rl/best", "checkpoints/rl", "checkpoints", "rollouts")
_PHASES = ("", "warm_start")


class Before:
    """Content of a run directory, or its absence, before a command touches it."""

    def __init__(self, path: Path):
        self._path = path
        parents = [folder for folder in (path, *path.parents) if not folder.exists()]
        made = [path / phase / name for phase in _PHASES[::-1] for name in _MADE] + [path / "warm_start"]
        self._new = [folder for folder in made if not folder.exists()] + parents
        self._files = {name: _content(path / name) for name in self._names(_WRITTEN)}
        self._sizes = {name: _size(path / name) for name in self._names((_GROWS,))}
        self._progress = self._find_progress()

    def put_back(self) -> None:
        """Undo what was written, unless there are rows of metrics or checkpoints that there were not."""
        if self._find_progress() != self._progress:
            return
        for name, content in self._files.items():
            _write(self._path / name, content)
        for name, size in self._sizes.items():
            if size is None:
                _write(self._path / name, None)
            elif size != _size(self._path / name):
                os.truncate(self._path / name, size)
        for folder in self._new:
            with contextlib.suppress(OSError):  # not empty, or not made
                folder.rmdir()

    @staticmethod
    def _names(names: tuple[str, ...]) -> list[str]:
        return [os.path.join(phase, name) for phase in _PHASES for name in names]

    def _find_progress(self) -> list[object]:
        """Return what grows by updates: rows of metrics, and steps in folders of checkpoints."""
        found: list[object] = []
        for phase in _PHASES:
            found.append(_size(self._path / phase / "metrics.jsonl") or 0)
            for place in ("checkpoints", "checkpoints/rl"):
                with contextlib.suppress(OSError):
                    found.append(sorted(name for name in os.listdir(self._path / phase / place) if name.isdecimal()))
        return [one for one in found if one]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _write(path: Path, content: bytes | None) -> None:
    if content is None:
        if path.is_file():
            path.unlink()
    elif _content(path) != content:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(content)
        os.replace(temporary, path)
