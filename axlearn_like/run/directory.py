"""A run's directory: its files, and the lock of the run that owns it."""

import contextlib
import difflib
import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, override

from axlearn_like.config import strip_comments
from axlearn_like.run.closing import Closing
from axlearn_like.run.mirror import RunMirror, RunTaken, working_folder
from axlearn_like.run.object_store import local_path
from axlearn_like.run.opening import Before, Holder, is_alive, parse_owner, same_run, this_process
from mesh.errors import UserError
from mesh.files.bounded import is_readable, read_bounded, read_text
from mesh.files.bucket import BucketError, bucket_url
from mesh.files.written import check_folder, foreign_owner, me, open_written, replace_file

_CLASS = re.compile(r"[\w.]+:(\w+)$", re.MULTILINE)  # class of the config's root


class RunDirectoryError(UserError):
    """The directory cannot be used for this run; nothing in it was changed."""


class RunDirectory(Closing):
    """One run's files and the lock on them, held until `close` or the end of the `with` block."""

    def __init__(self, path: Path, mirror: RunMirror | None = None):
        self.path, self._mirror = path, mirror
        self.config_path = path / "config.txt"  # config as text
        self.resolved_config_path = path / "config_resolved.txt"  # the same with the values that parents set
        self.metrics_path = path / "metrics.jsonl"  # rows of metrics.py
        self.events_path = path / "events.jsonl"  # rows of events.py
        self.checkpoints = path / "checkpoints"
        self.rollouts = path / "rollouts"  # samples for people to read
        self.lock_path = path / "run.lock"  # lock, with the process that holds it
        self._before: Before | None = None  # None once the opening command has had an effect
        self.force = False
        self.forced = False  # True if this opening has replaced the config

    @classmethod
    def open(cls, path: str | os.PathLike[str], config_text: str, *, force: bool = False) -> "RunDirectory":
        """Create the directory, or open it again to resume.

        Args:
            path: path of the directory, or its URL in a bucket, of which `path` is then the working folder.
            config_text: the run's whole config. It is written at the first opening and must be the
                same at later ones, but for `num_steps`, which may grow.
            force: accept (and record) another config than the one recorded, and a directory of another user.

        Raises:
            RunDirectoryError: not writable, not a run's directory, another config, another user's, or the run is
                still alive.
        """
        url = bucket_url(path)
        try:
            mirror = None if url is None else RunMirror(url)
        except (RunTaken, BucketError) as error:
            raise RunDirectoryError(str(error)) from error
        run = cls(mirror.folder if mirror else local_path(path, "run directory").absolute(), mirror)
        run.force = force
        before = Before(run.path)
        try:
            run._make(force)
            run._lock()
        except RunDirectoryError:
            before.remove_folders()
            run._end_copies(copy=False)
            raise
        run._before = before
        try:
            before.read()
            run._check_config(config_text, force)
            recorded = read_bounded(run.config_path) if is_readable(run.config_path) else None
            if force and recorded is not None:
                run.forced = not same_run(recorded.decode(errors="replace"), config_text)
                before.keep()
            if recorded != config_text.encode():
                replace_file(run.config_path, config_text)
            for folder in (run.checkpoints, run.rollouts):
                folder.mkdir(exist_ok=True)
                check_folder(folder)
        except RunDirectoryError:
            run._put_back()
            raise
        except OSError as error:
            run._put_back()
            raise RunDirectoryError(f"cannot write to run directory {run.path}: {error}") from error
        if mirror:
            mirror.start()
        return run

    @classmethod
    def attach(cls, path: str | os.PathLike[str]) -> "RunDirectory":
        """Return the directory of a run that another process holds open: no lock, nothing created."""
        url = bucket_url(path)
        return cls(local_path(path, "run directory").absolute() if url is None else working_folder(url))

    @property
    def where(self) -> str:
        """The place of the run, for people: its path, or the bucket and the working folder."""
        if self._mirror is None:
            return str(self.path)
        return f"{self._mirror.url} (working folder {self.path}; copied there at each checkpoint and at the end)"

    def is_cut_off(self) -> bool:
        """Return True if copies to the bucket have failed for good, so that the run should end; `close` says why."""
        return self._mirror is not None and self._mirror.error is not None

    def read_config(self) -> str:
        """Return the text of the recorded config; not of one that a killed command has forced, if nothing came of it.

        Raises:
            RunDirectoryError: it is not there, may not be read, or is no text.
        """
        try:
            in_use = (holder := self.holder()) is not None and holder.alive is not False
            before = None if in_use else Before(self.path).replaced_config()
            return read_text(self.config_path) if before is None else before
        except (OSError, UnicodeDecodeError) as error:
            raise RunDirectoryError(f"cannot read {self.config_path}: {error}") from error

    @override
    def close(self) -> None:
        """Release the lock; the next `open` may come from any process."""
        if self._before is not None:
            self._before.accept()
        self._release()
        self._end_copies()

    def _end_copies(self, *, copy: bool = True) -> None:
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            mirror.close(copy=copy)

    def _release(self) -> None:
        if self.lock_path.exists():
            with self._lock_file() as file:
                if parse_owner(file.read()) == this_process():
                    file.truncate(0)

    @override
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the lock; a command that was refused before its first update leaves the directory as it was."""
        if kind is None:
            self.close()
        elif issubclass(kind, UserError):
            self._put_back()
        else:  # same as after a kill: the next command restores the config unless the forced one had an effect
            self._release()
            with contextlib.suppress(UserError):  # the error that ends the run is the one to see
                self._end_copies()

    def _put_back(self) -> None:
        """Put the files back while the lock is held, then release it."""
        if self._before is not None:
            self._before.put_back()
        self._release()
        if self._before is not None:
            self._before.remove_lock()
            self._before.remove_folders()
        with contextlib.suppress(UserError):
            self._end_copies(copy=self.config_path.exists())

    def _make(self, force: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RunDirectoryError(f"run directory {self.path} is a file; expected a directory or a new path")
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts and answers are in it
            foreign = [] if self.config_path.exists() else sorted(os.listdir(self.path))
        except OSError as error:
            raise RunDirectoryError(f"cannot make run directory {self.path}: {error}") from error
        # `launch`: of processes that wait for the first to open it.
        own = ("run.lock", "launch")
        foreign = [name for name in foreign if name not in own and not name.startswith((".config.txt.", ".owner."))]
        if foreign:
            raise RunDirectoryError(
                f"{self.path} is not a run directory: it has no config.txt but holds "
                f"{', '.join(foreign[:3])}; expected a run's directory, an empty one or a new path"
            )
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise RunDirectoryError(f"run directory {self.path} is not writable")
        if not force and (other := foreign_owner(self.path)):
            raise RunDirectoryError(
                f"run directory {self.path} belongs to {other}, who may read and change all that this run of {me()} "
                "writes there; expected a directory of your own, or --force where you trust them"
            )

    def _check_config(self, config_text: str, force: bool) -> None:
        if not self.config_path.exists():
            return
        if force:
            self._check_kind(config_text)
            return
        recorded = self.read_config()
        if same_run(recorded, config_text):
            return
        changes = [
            line
            for line in difflib.unified_diff(recorded.splitlines(), config_text.splitlines(), lineterm="", n=0)
            if line[:1] in "+-" and line[:3] not in ("+++", "---")
        ]
        shown = "\n".join(f"  {line}" for line in changes[:6])
        more = f"\n  ... and {len(changes) - 6} more lines" if len(changes) > 6 else ""
        raise RunDirectoryError(
            f"run directory {self.path} holds a run of another config "
            f"(-: recorded, +: asked for):\n{shown}{more}\n"
            "Take another directory, or --force to resume with the new config"
        )

    def _check_kind(self, config_text: str) -> None:
        """Refuse a run of another class: it would write beside the files of this one."""
        recorded = strip_comments(read_bounded(self.config_path).decode(errors="replace"))
        classes = [_CLASS.match(text) for text in (recorded, strip_comments(config_text))]
        names = [found[1] for found in classes if found]
        if len(set(names)) > 1:
            raise RunDirectoryError(
                f"run directory {self.path} holds a run of {names[0]}, and this is one of {names[1]}, with which "
                "--force cannot go on; take another directory"
            )

    def holder(self) -> Holder | None:
        """Return the process that has opened the directory and has not closed it; nothing is written.

        None: it is closed. One that is not alive was killed, or its machine went down.
        """
        owner = parse_owner(read_bounded(self.lock_path)) if is_readable(self.lock_path) else None
        if owner is None:
            return None
        here = owner["host"] == socket.gethostname()
        return Holder(owner["pid"], str(owner["host"]), is_alive(owner) if here else None)

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[Any]:
        """The lock file, held for a moment so that two processes do not take it over at once."""
        with open_written(self.lock_path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            yield file

    def _lock(self) -> None:
        try:
            with self._lock_file() as file:
                owner = parse_owner(file.read())
                if owner and is_alive(owner):
                    raise RunDirectoryError(
                        f"run directory {self.path} is in use by process {owner['pid']} on "
                        f"{owner['host']}; wait for it or end it. "
                        f"If that host is gone for good, rename {self.lock_path}"
                    )
                file.truncate(0)
                file.write(json.dumps(this_process()))
        except OSError as error:
            raise RunDirectoryError(f"cannot lock run directory {self.path}: {error}") from error
