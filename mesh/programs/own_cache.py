"""JAX's cache of programs on disk, with this user's entries alone: loading a program may run code that it holds.

JAX loads whatever has the name of a key. Who may write the folder, or could at any time, can have put a program there.
"""

import errno
import logging
import os
import stat
from pathlib import Path

from mesh.files.bounded import BoundsError, check_regular
from mesh.files.written import UnsafeFileError, foreign_owner, me, owner, replace_file
from mesh.programs.jax_internals import keep_programs_by

_log = logging.getLogger(__name__)
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def use_own_entries(folder: Path, *, chosen: bool) -> None:
    """Let JAX load this user's entries of a folder alone.

    On a disk that gives all files one owner, such as a bucket's, it loads all: who may write that runs the job anyway.

    Args:
        folder: it exists.
        chosen: the user has named it, so that its mode is theirs to change; else others lose their right to write.

    Raises:
        UnsafeFileError: it belongs to somebody else, or others may write it.
    """
    found = folder.stat()
    if (other := foreign_owner(folder)) is not None:
        raise UnsafeFileError(
            f"compiled programs in {folder}: it belongs to {other}, whose programs could run code as {me()}; expected "
            "a folder of your own in AXL_COMPILATION_CACHE, or off"
        )
    own = found.st_uid == os.geteuid()
    if own and stat.S_IMODE(found.st_mode) & _OTHERS:
        if chosen:
            raise UnsafeFileError(
                f"compiled programs in {folder}: others may write it, whose programs could run code as {me()}; "
                f"expected mode 0755 or less (chmod go-w {folder}), or another folder in AXL_COMPILATION_CACHE"
            )
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
    keep_programs_by(load_own if own else _load, replace_file)


def load_own(path: Path) -> bytes | None:
    """Return the content of an entry; None: there is none that belongs to this user and that no other may write."""
    try:
        return _read_own(path)
    except FileNotFoundError:
        return None
    except UnsafeFileError as error:
        _log.warning("%s; the program is compiled instead", error)
        return None


def _load(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _read_own(path: Path) -> bytes:
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise UnsafeFileError(f"{path} is a link or a socket; expected a file of {me()}") from None
        raise
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        try:
            check_regular(found.st_mode)
        except BoundsError as error:
            raise UnsafeFileError(f"{path}: {error}") from None
        if found.st_uid != os.geteuid():
            raise UnsafeFileError(f"{path} belongs to {owner(found.st_uid)}; expected a file of {me()}")
        if stat.S_IMODE(found.st_mode) & _OTHERS:
            raise UnsafeFileError(f"{path} may be written by others; expected mode 0600 or 0644")
        return file.read()
