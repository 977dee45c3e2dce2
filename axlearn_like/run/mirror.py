"""A run directory in a bucket: a working folder here, and its copy there, made as the run goes on.

Processes append to files, link and lock them, which no bucket can. So the run works in a folder of this machine. A
thread copies each finished checkpoint to the bucket, with the files beside it; the object `COMPLETE` in a step is
written last. Another machine begins with what is there.

Who owns the run stands in `owner/NUMBER.json`: the highest number is the owner's. It is made by a precondition (there
is none yet), so one machine gets it; its time is renewed while the run lives. An owner that finds a higher number has
been replaced, and writes no more.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from axlearn_like.run.events import EventLog
from axlearn_like.run.object_store import COMPLETE, KEPT, OWNERS, fetched, say_fetching, select_files, step_of
from axlearn_like.run.opening import is_alive_here, this_process
from mesh.errors import UserError
from mesh.files.bucket import Bucket, BucketError
from mesh.files.cache_directory import cache_directory
from mesh.files.hard_links import link_tree
from mesh.files.written import replace_file

_POLL, _BEAT, _LEASE, _LOGS = 1.0, 20.0, 90.0, 60.0  # seconds: looks, signs of life, their validity, copies of logs
_LOCAL = re.compile(
    r"\..*|run\.lock|launch|ray|.*[.-](tmp|partial|incoming|outgoing|lock)\b.*"
)  # files of this machine alone

_open: set[str] = set()  # ids of the owners in this process


class RunTaken(UserError):
    """The run in the bucket belongs to another machine."""


class RunMirror:
    """The copy of one working folder in a bucket, kept by two threads until `close`."""

    def __init__(self, url: str):
        """Become the owner, and fetch what the working folder lacks.

        Raises:
            RunTaken: another machine owns the run. BucketError: the bucket cannot be read or written.
        """
        self.url, self.folder = url, working_folder(url)
        self._ids = self.folder.with_name(f".{self.folder.name}.ids.json")  # ids of owners that worked in this folder
        self._bucket, self._id = Bucket(url, "run directory"), secrets.token_hex(8)
        self._owners = Bucket(f"{url}/{OWNERS[:-1]}", "run directory")
        files = self._bucket.files()
        owners = sorted(name for name in files if name.startswith(OWNERS))
        last = json.loads(self._bucket.read(owners[-1])) if owners else {}
        self._refuse_owned(last)
        known = self._known()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._ids, json.dumps([*known, self._id]))  # first: what is here is not set aside after a kill
        self._number = int(owners[-1][len(OWNERS) : -5]) + 1 if owners else 1
        self._record = {**this_process(), "id": self._id, "since": time.time()}
        if not self._bucket.create(self._name(), self._said()):
            raise RunTaken(f"run directory {url} has just been taken by another machine; run the same command again")
        self._bucket.remove(owners[:-1])
        _open.add(self._id)
        self.error: UserError | None = None
        self._sent: dict[str, Any] = {}  # name -> stamp of the file that it is a copy of
        self._there = set(files) - set(owners)
        self._seen: set[str] = set()  # steps that were here
        self._events = EventLog(self.folder / "events.jsonl")
        if last.get("id") not in known or not self.folder.exists():
            self._fetch(files)
        shutil.rmtree(self.folder / ".outgoing", ignore_errors=True)
        both = [name for name in self._there if step_of(name) and (self.folder / name).is_file()]
        self._inodes = {_stamp((self.folder / name).stat()): name for name in both}
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._keep_alive, self._keep_copied)]

    def start(self) -> None:
        """Begin to copy: the command is not refused."""
        for thread in self._threads:
            thread.start()

    def close(self, *, copy: bool = True) -> None:
        """Copy what is left and give the run up; the error that ended the copies is raised.

        `copy`: False where nothing came of the command.
        """
        self._ending.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        _open.discard(self._id)
        try:
            if copy and self.error is None:
                self._sync(confirmed=False)
                shutil.rmtree(self.folder / ".outgoing", ignore_errors=True)
            if not isinstance(self.error, RunTaken):
                self._bucket.write(self._name(), self._said(ended=True))
        except UserError as error:
            self.error = self.error or error
        if self.error is not None and copy:
            raise type(self.error)(
                f"{self.error}; all files are in {self.folder}, and the same command on this machine goes on from there"
            )

    def _refuse_owned(self, last: Mapping[str, Any]) -> None:
        if not last or last.get("ended"):
            return
        lives, quiet = is_alive_here(last), time.time() - last["beat"]
        if lives and last["pid"] == os.getpid() and last["id"] not in _open:
            lives = False  # a process that could not say that it gave the run up
        if lives is False or (lives is None and quiet > _LEASE):
            return
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["since"]))
        left = "" if lives else f"; if that machine is gone, the same command takes over in {_LEASE - quiet:.0f} s"
        raise RunTaken(
            f"run directory {self.url} is in use by process {last['pid']} on {last['host']} since {since} (last sign "
            f"of life {max(0.0, quiet):.0f} s ago); wait for it or end it{left}"
        )

    def _known(self) -> list[str]:
        try:
            return json.loads(self._ids.read_text())
        except (OSError, ValueError):
            return []

    def _fetch(self, files: Mapping[str, tuple[int, str]]) -> None:
        """Make the working folder of what is in the bucket; one of an earlier owner is set aside."""
        if self.folder.exists():
            aside = self.folder.with_name(f"{self.folder.name}.before-{self._number}-{self._id}")
            self.folder.rename(aside)
            print(f"{self.url} is not what this machine left; its own working folder is now {aside}", file=sys.stderr)
        for remains in self.folder.parent.glob(f"{self.folder.name}.*.partial"):
            shutil.rmtree(remains)
        partial = self.folder.with_name(f"{self.folder.name}.{self._id}.partial")
        sizes = {name: files[name][0] for name in select_files(files, None)}
        if sizes:
            say_fetching(self.url, self.folder, sum(sizes.values()), len(sizes))
            self._bucket.get({name: partial / name for name in sizes}, sizes)
            partial.rename(self.folder)

    def _name(self) -> str:
        return f"{OWNERS}{self._number:06d}.json"

    def _said(self, **fields: Any) -> bytes:
        return json.dumps({**self._record, "beat": time.time(), **fields}).encode()

    def _check_owner(self) -> None:
        newest = max([self._name(), *(OWNERS + name for name in self._owners.files())])
        if newest > self._name():
            other = json.loads(self._bucket.read(newest))
            raise RunTaken(
                f"run directory {self.url} was taken over by process {other['pid']} on {other['host']}: this machine "
                f"gave no sign of life for {_LEASE:.0f} s"
            )

    def _keep_alive(self) -> None:
        while not self._ending.wait(_BEAT):
            try:
                self._check_owner()
                self._bucket.write(self._name(), self._said())
            except RunTaken as error:
                self.error = error
                return
            except BucketError:
                continue  # errors that last are raised by the copies

    def _keep_copied(self) -> None:
        copied = took = 0.0
        while not self._ending.wait(_POLL) and self.error is None:
            began = time.monotonic()
            try:
                if self._sync(confirmed=True, logs=began - copied > max(_LOGS, 20 * took)):  # logs may be long
                    copied, took = time.monotonic(), time.monotonic() - began
            except FileNotFoundError:  # deletion was faster: look again
                continue
            except Exception as error:
                said = BucketError(f"{self.url} could not be copied to: {type(error).__name__}: {error}")
                self.error = error if isinstance(error, UserError) else said

    def _sync(self, *, confirmed: bool, logs: bool = True) -> bool:
        """Copy new checkpoints, and what has changed beside them; True: something was due.

        Args:
            confirmed: take a step only if nobody is deleting it: the newest of a folder; of the best those that
                had the same files at a look before this one.
            logs: copy without a new step, too.
        """
        steps, loose = self._local()
        staged, due = self.folder / ".outgoing", list[str]()
        for step in sorted(steps - {name.removesuffix(f"/{COMPLETE}") for name in self._there}):
            source, held = self.folder / step, Path(step).parent.name in KEPT
            if confirmed and not held and not _is_newest(source):
                continue
            seen = (staged / step).is_dir() and _names(staged / step) == _names(source)
            if not seen:
                shutil.rmtree(staged / step, ignore_errors=True)
                with contextlib.suppress(OSError):  # deletion has begun
                    link_tree(source, staged / step)
            if (staged / step).is_dir() and (not confirmed or (seen if held else _is_newest(source))):
                due.append(step)
        if not due and not logs:
            return False
        early = [name for name in loose if "checkpoints" not in Path(name).parts]
        self._put_changed(early)  # rows up to these steps are in them
        for step in due:
            self._publish(step, staged / step)
        self._put_changed([name for name in loose if name not in early])  # best.json names steps that are there
        self._remove_gone(steps)
        return True

    def _local(self) -> tuple[set[str], list[str]]:
        """Return the finished steps of the working folder, and the files beside them that belong in the bucket."""
        steps, loose = set[str](), list[str]()
        for parent, folders, names in os.walk(self.folder):
            place = Path(parent).relative_to(self.folder)
            folders[:] = [name for name in folders if not _LOCAL.fullmatch(name)]
            steps |= {str(place / name) for name in folders if step_of(f"{place / name}/x")}
            folders[:] = [name for name in folders if str(place / name) not in steps]
            loose += [
                str(place / name) for name in names if not _LOCAL.fullmatch(name) and Path(parent, name).is_file()
            ]
        self._seen |= steps
        return steps, loose

    def _put_changed(self, names: list[str]) -> None:
        for name in names:
            try:
                with open(self.folder / name, "rb") as file:
                    stat = os.fstat(file.fileno())
                    if self._sent.get(name) == (stamp := _stamp(stat)):
                        continue
                    content = file.read(stat.st_size)  # files may grow
            except FileNotFoundError:
                continue
            self._bucket.write(name, content)
            self._sent[name] = stamp
            self._there.add(name)

    def _publish(self, step: str, staged: Path) -> None:
        """Copy one checkpoint; files that are links to what is there already are copied within the bucket."""
        began, new, sizes = time.monotonic(), dict[str, Path](), dict[str, int]()
        for inner in _names(staged):
            stat = (staged / inner).stat()
            name, inode = f"{step}/{inner}", _stamp(stat)
            sizes[inner] = stat.st_size
            if (source := self._inodes.get(inode)) in self._there and source is not None:
                self._bucket.copy(source, name)
            else:
                self._inodes[inode], new[name] = name, staged / inner
        self._bucket.put(new)
        self._check_owner()
        self._bucket.write(f"{step}/{COMPLETE}", json.dumps(sizes).encode())
        self._there |= {f"{step}/{inner}" for inner in (*sizes, COMPLETE)}
        nbytes, seconds = sum(path.stat().st_size for path in new.values()), round(time.monotonic() - began, 3)
        self._events.append("driver", "copied", step=int(staged.name), seconds=seconds, nbytes=nbytes, to=self.url)
        shutil.rmtree(staged)

    def _remove_gone(self, steps: set[str]) -> None:
        """Delete what this machine has deleted, and steps older than all that it has of a folder."""
        gone = [name for name in self._there if not step_of(name) and not (self.folder / name).exists()]
        for step in {step_of(name) or "" for name in self._there} - steps - {""}:
            beside = sorted(int(Path(one).name) for one in steps if Path(one).parent == Path(step).parent)
            if step in self._seen or (len(beside) > 1 and int(Path(step).name) < beside[0]):
                inside = [name for name in self._there if name.startswith(f"{step}/")]
                self._bucket.remove([f"{step}/{COMPLETE}"])  # first: no half checkpoint is listed
                gone += inside
        self._bucket.remove(gone)
        self._there -= set(gone)
        for name in gone:
            self._sent.pop(name, None)


def working_folder(url: str) -> Path:
    """Return the folder of this machine in which the run of this URL works."""
    scheme, _, root = url.partition("://")
    return cache_directory("runs") / scheme / root


def fetch_logs(url: str, only: Callable[[str], bool] = lambda name: True) -> Path:
    """Return a copy of a run's files beside its checkpoints, with the owner of a live one in `run.lock`.

    Nothing is written to the bucket, so it may be called of any run at any time. `only`: as for `fetched`.

    Raises:
        BucketError: nothing is there, or it cannot be read.
    """
    folder, there = fetched(url, "RUN", version="none", only=only, quiet=True), Bucket(f"{url}/{OWNERS[:-1]}", "RUN")
    owner = json.loads(there.read(max(names))) if (names := there.files()) else {"ended": True}
    if folder.is_dir():
        replace_file(folder / "run.lock", "" if owner.get("ended") else json.dumps(owner))
    return folder


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _is_newest(step: Path) -> bool:
    return int(step.name) >= max((int(name) for name in os.listdir(step.parent) if name.isdecimal()), default=0)
