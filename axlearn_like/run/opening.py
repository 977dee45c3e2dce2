"""Opening of a run directory: its owner, the config that goes on with it, and the state before a command.

That is put back if the command is refused before it has got anywhere.

Before a forced config is written, what it replaces is written to a file in the directory: a command that was killed
before it was refused or had got anywhere is undone by the next one. Commands that only read see the config that it
replaced.
"""

import contextlib
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axlearn_like.config import strip_comments
from mesh.files.bounded import LARGE, parse_json, read_bounded
from mesh.files.written import open_written, replace_file


@dataclass(frozen=True)
class Holder:
    """The process that has opened a run directory. `alive`: None where its machine cannot be asked."""

    pid: int
    host: str
    alive: bool | None


def this_process() -> dict[str, Any]:
    """Return what tells this process from all others, as JSON."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "started": _start_time(pid), "boot": _boot()}


def _boot() -> str:
    """Return an id of this start of the machine; "" where there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_alive_here(owner: Mapping[str, Any]) -> bool | None:
    """Return True if a process of this machine is alive; None if it is of another machine."""
    here = (owner.get("host"), owner.get("boot")) == (socket.gethostname(), _boot())
    return is_alive(owner) if here else None


def _start_time(pid: int) -> str | None:
    """Return when the process began, which distinguishes it from a later process of the same number.

    A restarted container nearly always gets the same process number again. None where there is no
    /proc; "ended" for a process that has ended and only waits for its parent to notice.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "ended" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


def parse_owner(text: str | bytes) -> dict[str, Any] | None:
    """Return `this_process` of a lock's text; None: it holds none."""
    try:
        owner = parse_json(text.encode() if isinstance(text, str) else text)
    except ValueError:  # writer died in the middle
        return None
    whole = isinstance(owner, dict) and {"pid", "host", "started"} <= set(owner)
    return owner if whole and type(owner["pid"]) is int and 0 < owner["pid"] < 1 << 31 else None


def is_alive(owner: Mapping[str, Any]) -> bool:
    """Return False if a process is known to have ended; one of another host cannot be seen from here."""
    if owner["host"] != socket.gethostname():
        return True
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return owner["started"] is None or owner["started"] == _start_time(owner["pid"])


# Files that a command writes before its first update; `events.jsonl` only grows.
_WRITTEN = ("config.txt", "config_resolved.txt", "data.json", "report.json")
_GROWS = "events.jsonl"
_MADE = ("checkpoints/rl/best/pending", "checkpoints/rl/best", "checkpoints/rl", "checkpoints", "rollouts")
_PHASES = ("", "warm_start")
_LOCK, _UNDO = "run.lock", ".undo.json"
_ENCODING = "latin-1"  # one character for each byte of the file


class Before:
    """Content of a run directory, or its absence, before a command touches it."""

    def __init__(self, path: Path):
        """Note the folders that are not there; `read` does the rest."""
        self._path, self._undo = path, path / _UNDO
        parents = [folder for folder in (path, *path.parents) if not folder.exists()]
        made = [path / phase / name for phase in _PHASES[::-1] for name in _MADE] + [path / "warm_start"]
        self._new = [folder for folder in made if not folder.exists()] + parents
        self._locked = (path / _LOCK).exists()
        self._files: dict[str, bytes | None] = {}
        self._sizes: dict[str, int | None] = {}
        self._progress: list[object] = []

    def read(self) -> None:
        """Note the files, after those that a killed command has forced are put back. The lock is held."""
        if self._undo.is_file():
            if self._recall():
                with contextlib.suppress(ValueError, TypeError):  # sizes may be none
                    self.put_back()
            self.accept()
        self._files = {name: _content(self._path / name) for name in _names(*_WRITTEN)}
        self._sizes = {name: _size(self._path / name) for name in _names(_GROWS)}
        self._progress = self._find_progress()

    def replaced_config(self) -> str | None:
        """Return the config that a killed command has replaced, if nothing has come of its own; None: there is none."""
        content = self._files["config.txt"] if self._recall() and self._find_progress() == self._progress else None
        return None if content is None else content.decode(errors="replace")

    def _recall(self) -> bool:
        """Take what a killed command has kept; False: it is not there, or not what `keep` writes."""
        try:
            before = parse_json(_content(self._undo) or b"")
            texts = {name: before["files"][name] for name in _names(*_WRITTEN)}
            self._sizes = {name: before["sizes"][name] for name in _names(_GROWS)}
            self._files = {name: text and text.encode(_ENCODING) for name, text in texts.items()}
            self._progress = before["progress"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return False
        return True

    def keep(self) -> None:
        """Write what was read to the disk: a command killed from now on is undone by the next `read`."""
        files = {name: None if content is None else content.decode(_ENCODING) for name, content in self._files.items()}
        kept = {"files": files, "sizes": self._sizes, "progress": self._progress}
        _write(self._undo, json.dumps(kept).encode())

    def put_back(self) -> None:
        """Undo what was written, unless there are rows of metrics or checkpoints that there were not."""
        if self._find_progress() == self._progress:
            for name, content in self._files.items():
                _write(self._path / name, content)
            for name, size in self._sizes.items():
                if size is None:
                    _write(self._path / name, None)
                elif size != _size(self._path / name):
                    with open_written(self._path / name) as file:
                        file.truncate(size)
        self.accept()

    def accept(self) -> None:
        """Forget what was: the command has ended well."""
        self._undo.unlink(missing_ok=True)

    def remove_lock(self) -> None:
        """Remove the lock of a directory that was no run's, once it is released."""
        if not self._locked and self._files.get("config.txt") is None and not (self._path / "config.txt").exists():
            (self._path / _LOCK).unlink(missing_ok=True)

    def remove_folders(self) -> None:
        """Remove the folders that there were not, as far as nothing is in them."""
        for folder in self._new:
            with contextlib.suppress(OSError):  # folder is not empty, or was not made
                folder.rmdir()

    def _find_progress(self) -> list[object]:
        """Return what grows by updates: rows of metrics, and steps in folders of checkpoints."""
        found: list[object] = []
        for phase in _PHASES:
            found.append(_size(self._path / phase / "metrics.jsonl") or 0)
            for place in ("checkpoints", "checkpoints/rl"):
                with contextlib.suppress(OSError):
                    found.append(sorted(name for name in os.listdir(self._path / phase / place) if name.isdecimal()))
        return [one for one in found if one]


def _names(*names: str) -> list[str]:
    return [os.path.join(phase, name) for phase in _PHASES for name in names]


def _content(path: Path) -> bytes | None:
    return read_bounded(path, LARGE) if path.is_file() else None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _write(path: Path, content: bytes | None) -> None:
    if content is None:
        if path.is_file():
            path.unlink()
    elif _content(path) != content:
        replace_file(path, content)


_POLICIES = re.compile(r"^polic(?:ies|y_shares|y_quotas|y_slots)\b.*\n?", re.MULTILINE)  # fields of a run with several
_SEVERAL = re.compile(r"^policies: (?!\{\}$)", re.MULTILINE)
_NUM_STEPS = re.compile(r"^num_steps: (\d+)$", re.MULTILINE)


def same_run(recorded: str, wanted: str) -> bool:
    """Return True if a run with the recorded config text may be resumed with the wanted one.

    Comments may differ, and `num_steps` may be larger than it was: a run can be extended. Where several policies
    are trained, others may come or go: each has a directory of its own, with its config.
    """
    old, new = strip_comments(recorded), strip_comments(wanted)
    if _SEVERAL.search(old) and _SEVERAL.search(new):
        old, new = _POLICIES.sub("", old), _POLICIES.sub("", new)
    before, after = _NUM_STEPS.search(old), _NUM_STEPS.search(new)
    if before and after and int(before[1]) < int(after[1]):
        new = new[: after.start()] + before[0] + new[after.end() :]
    return old == new
