"""Memory shared by the processes of one user on one host: written by one, read in place by the others.

A segment is a file of mode 0600 in /dev/shm (the directory of temporary files where there is none). Every process that
maps it holds a lock on it, which the kernel releases when the process ends, by any cause: so the last process to
release it removes the file, and `sweep` removes the files of killed processes. (Process ids would not do: they are
reused, and containers that share /dev/shm each count from 1.)
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import mmap
import os
import platform
import re
import secrets
import stat
import tempfile
import weakref
from collections.abc import Buffer
from pathlib import Path
from typing import Self

import numpy as np

from mesh import UserError
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.transport.buffers import view_of

_NAME = re.compile(r"axl-[0-9]{1,10}-[0-9a-f]{16}")
_SHARED_MEMORY = Path("/dev/shm")


class SegmentGone(VersionGone, FileNotFoundError):
    """The segment of this name does not exist (any more)."""


class Segment:
    """Shared memory. `create` it or `attach` to it; the memory lives while any process maps it.

    Attributes:
        name: by which other processes find it.
        nbytes: its size.
        buffer: uint8 [nbytes], page-aligned; zeros when new. Read-only where attached.
    """

    def __init__(self, path: Path, descriptor: int, nbytes: int, *, made_here: bool):
        """Use `create` or `attach` instead. `descriptor` is locked, and owned by the segment."""
        self.name, self.nbytes = path.name, nbytes
        self._path, self._descriptor, self._made_here = path, descriptor, made_here
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if made_here else 0)
        memory = mmap.mmap(descriptor, nbytes or 1, prot=protection)  # keeps the file open, and so the lock
        self.buffer = np.frombuffer(memory, np.uint8, nbytes)
        weakref.finalize(self, _let_go, path, descriptor, os.getpid())

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """Create a segment. Its pages are reserved now, and zeroed when first touched.

        Its file is removed by `unlink`, or when the last process has released it: no `Segment` of it is left, or the
        process exited normally. After kill -9 `sweep` removes it.

        Raises:
            UserError: there is too little shared memory. (If pages were only promised, a process that writes to a
                missing one would be killed.)
        """
        folder = _folder()
        path, descriptor = _new_file(folder, nbytes)
        try:
            _set_aside(descriptor, nbytes or 1)
            return cls(path, descriptor, nbytes, made_here=True)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise UserError(_too_small(folder, nbytes, error.strerror)) from error

    @classmethod
    def attach(cls, name: str, nbytes: int | None = None) -> Self:
        """Map a segment of another process of the same user on this host, read-only.

        Raises:
            SegmentGone: there is none of this name.
            WeightsError: it is another user's, accessible to others, or not of `nbytes` bytes where that is given.
        """
        if not _NAME.fullmatch(name):
            raise WeightsError(f"{name!r} is no name of a shared memory segment")
        path = _folder() / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise SegmentGone(f"shared memory {path} is gone: its maker dropped it or ended") from error
        except OSError as error:
            raise WeightsError(f"shared memory {path} cannot be read: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            facts = os.fstat(descriptor)
            if not facts.st_nlink:
                raise SegmentGone(f"shared memory {path} is gone: its maker dropped it or ended")
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
                raise WeightsError(f"shared memory {path} is not a file of mode 0600 of user {os.geteuid()}")
            if nbytes is not None and facts.st_size != max(nbytes, 1):
                raise WeightsError(f"shared memory {path} has {facts.st_size:,} bytes, expected {nbytes:,}")
            if not facts.st_size:
                raise WeightsError(f"shared memory {path} is empty")
            return cls(path, descriptor, facts.st_size if nbytes is None else nbytes, made_here=False)
        except BaseException:
            os.close(descriptor)
            raise

    def write(self, data: Buffer, offset: int = 0) -> None:
        """Copy data into a segment that this process created.

        On untouched pages this takes two thirds of the time of writing to `buffer`: they are not zeroed first, nor
        mapped one by one.

        Raises:
            ValueError: it does not fit, or is not C-contiguous.
        """
        view = view_of(data)
        if not self._made_here or offset < 0 or offset + view.nbytes > self.nbytes:
            raise ValueError(f"{view.nbytes:,} bytes at {offset:,} do not fit into {self.name} of {self.nbytes:,}")
        while view.nbytes:
            count = os.pwrite(self._descriptor, view, offset)
            view, offset = view[count:], offset + count

    def unlink(self) -> None:
        """Remove the name: nobody can attach any more; existing mappings stay valid. No effect in other processes."""
        if self._made_here:
            self._path.unlink(missing_ok=True)


def sweep() -> list[str]:
    """Remove this user's segments that no living process maps; return their names."""
    removed: list[str] = []
    with contextlib.suppress(OSError):
        for path in _folder().iterdir():
            if _NAME.fullmatch(path.name) and _remove_if_left(path):
                removed.append(path.name)
    return removed


@functools.cache
def host_identity() -> str:
    """Return an identity that is equal for processes that can share segments.

    It covers boot of the kernel, user and /dev/shm. Copies of one running virtual machine share it, too, so a segment
    may still not be found.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = platform.node()
    facts = _folder().stat()
    return hashlib.sha256(f"{boot} {os.geteuid()} {facts.st_dev} {facts.st_ino}".encode()).hexdigest()[:32]


def _folder() -> Path:
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _new_file(folder: Path, nbytes: int) -> tuple[Path, int]:
    """Create an empty file under our lock, open to read and write."""
    while True:
        path = folder / f"axl-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(_too_small(folder, nbytes, error.strerror)) from error
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # swept away before it was locked


def _remove_if_left(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # another user's, or just gone
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    except OSError:
        return False  # its maker lives
    finally:
        os.close(descriptor)


def _let_go(path: Path, descriptor: int, pid: int) -> None:
    """Remove the name if no other process has the segment."""
    try:
        if os.getpid() == pid:  # not in a fork, which shares our lock
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except OSError:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # for views that outlive the object: a lock that is refused is lost
    finally:
        os.close(descriptor)


def _set_aside(descriptor: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:  # macOS
        os.ftruncate(descriptor, nbytes)


def _too_small(folder: Path, nbytes: int, reason: str | None) -> str:
    free = ""
    with contextlib.suppress(OSError):
        facts = os.statvfs(folder)
        free = f", of which {facts.f_bavail * facts.f_frsize:,} of {facts.f_blocks * facts.f_frsize:,} are free"
    return (
        f"cannot set aside {nbytes:,} bytes of shared memory in {folder}{free}: {reason}; "
        "a container is given more with --shm-size (docker) or an emptyDir of medium BufferPool (Kubernetes)"
    )
