"""Memory shared by the processes of one user on one host: written by one, read in place by the others.

A segment is an anonymous file in memory (`memfd_create`) without a name in any directory. Other processes open it by
process id and descriptor of a process that holds it (/proc/<pid>/fd/<descriptor>). The kernel frees the memory when no
process holds it any more, however they ended: kill -9 of all processes of a run leaves nothing behind. The size of
/dev/shm, 64 MB in many containers, does not matter. Linux only: elsewhere no segment can be created.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import platform
import re
import stat
import weakref
from collections.abc import Buffer
from pathlib import Path
from typing import Self

import numpy as np
import psutil

from mesh import UserError
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.transport.buffers import view_of

_LABEL = "axl-weights"  # shown in /proc/<pid>/maps as /memfd:axl-weights
_NAME = re.compile(r"axl-([0-9]{1,10})-([0-9]{1,10})-([0-9]{1,20})")  # process, its descriptor, inode
_SPARE = 1 << 26  # bytes of free memory that no segment may take


class SegmentGone(VersionGone, FileNotFoundError):
    """The segment of this name does not exist (any more)."""


class SharedSegment:
    """Shared memory. `create` it or `attach` to it; the memory lives while any process maps it.

    Attributes:
        name: by which other processes can attach, while this object lives and `unlink` was not called.
        buffer: uint8 [nbytes], page-aligned; zeros when new. Read-only where attached. Keeps the memory alive.
    """

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool):
        """Use `create` or `attach` instead. The segment owns `descriptor`."""
        self.name = f"axl-{os.getpid()}-{descriptor}-{os.fstat(descriptor).st_ino}"
        self.nbytes, self._writable = nbytes, writable
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.buffer = np.frombuffer(mmap.mmap(descriptor, nbytes or 1, prot=protection), np.uint8, nbytes)
        self._file = os.fdopen(descriptor, "r+b" if writable else "rb", buffering=0)  # nothing fails from here on
        weakref.finalize(self, self._file.close)

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """Create a segment. All its pages are reserved now.

        Raises:
            UserError: there is too little free memory, or the system is not Linux. (If pages were only promised, a
                process that writes to a missing one would be killed.)
        """
        if not hasattr(os, "memfd_create"):
            raise UserError(f"shared memory needs Linux; this is {platform.system()}")
        if nbytes > (free := free_memory() - _SPARE):
            raise UserError(f"cannot reserve {nbytes:,} bytes of shared memory: {max(free, 0):,} bytes are free")
        descriptor = os.memfd_create(_LABEL, os.MFD_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o600)
            os.posix_fallocate(descriptor, 0, nbytes or 1)
            return cls(descriptor, nbytes, writable=True)
        except OSError as error:
            os.close(descriptor)
            raise UserError(f"cannot reserve {nbytes:,} bytes of shared memory: {error.strerror}") from error

    @classmethod
    def attach(cls, name: str, nbytes: int | None = None) -> Self:
        """Map a segment that a process of the same user on this host holds, read-only. The result has another name.

        Raises:
            SegmentGone: that process does not hold it (any more), or may not be asked by this one.
            WeightsError: it is another user's, accessible to others, or not of `nbytes` bytes where that is given.
        """
        if (found := _NAME.fullmatch(name)) is None:
            raise WeightsError(f"{name!r} is no name of a shared memory segment")
        pid, number, inode = map(int, found.groups())
        path = f"/proc/{pid}/fd/{number}"
        try:
            # Looked at before it is opened: to open something else, such as a pipe, may have effects.
            if not os.readlink(path).startswith(f"/memfd:{_LABEL}"):
                raise SegmentGone(f"shared memory {name} is gone: process {pid} holds something else there")
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentGone(f"shared memory {name} is gone: {error.strerror or error}") from error
        try:
            facts = os.fstat(descriptor)
            if facts.st_ino != inode:
                raise SegmentGone(f"shared memory {name} is gone: process {pid} holds another one there")
            if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
                raise WeightsError(f"shared memory {name} is not of mode 0600 of user {os.geteuid()}")
            if nbytes is not None and facts.st_size != max(nbytes, 1):
                raise WeightsError(f"shared memory {name} has {facts.st_size:,} bytes, expected {nbytes:,}")
            return cls(descriptor, facts.st_size if nbytes is None else nbytes, writable=False)
        except BaseException:
            os.close(descriptor)
            raise

    def write(self, data: Buffer, offset: int = 0) -> None:
        """Copy data into a segment that this process created.

        On untouched pages this takes two thirds of the time of writing to `buffer`: they are not mapped one by one.

        Raises:
            ValueError: it does not fit, is not C-contiguous, or the segment was attached or its name released.
        """
        view = view_of(data)
        if not self._writable or offset < 0 or offset + view.nbytes > self.nbytes:
            raise ValueError(f"{view.nbytes:,} bytes at {offset:,} do not fit into {self.name} of {self.nbytes:,}")
        while view.nbytes:
            count = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[count:], offset + count

    def unlink(self) -> None:
        """Release the name: nobody can attach by it any more; existing mappings stay valid."""
        self._file.close()


@functools.cache
def host_identity() -> str:
    """Return an identity that is equal for processes that can share segments.

    It covers boot of the kernel, user, and the namespaces (of containers) that decide which processes are visible.
    Copies of one running virtual machine share it, too, so a segment may still not be found.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user", "mnt")]
    except OSError:
        boot, namespaces = platform.node(), []
    return hashlib.sha256(f"{boot} {os.geteuid()} {namespaces}".encode()).hexdigest()[:32]


def free_memory() -> int:
    """Return the bytes that this process could still allocate: of the machine, and of its container if it has one."""
    free = psutil.virtual_memory().available
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            free = min(free, int(Path(limit).read_text()) - int(Path(usage).read_text()))
    return free
