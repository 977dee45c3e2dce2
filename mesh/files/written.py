"""Files written where others may have been before: a run directory of somebody else, a shared disk, /tmp.

Who may write a folder can put a link there, by which a file of the user is overwritten, a pipe that blocks, or a second
name of a file. So a file is opened only if it is a regular one with one name, never through a link, and is new or
replaced as a whole wherever that is possible. What is made is the user's own: prompts, answers and keys are in it.
"""

import os
import stat
import threading
from pathlib import Path
from typing import IO, Any

from mesh.errors import UserError
from mesh.files.bounded import BoundsError, check_regular

_PRIVATE = 0o600
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe without a reader is no wait


class UnsafeFileError(UserError, OSError):
    """A file or folder that is a link, a second name, no regular file, or somebody else's; the message names it."""


def open_written(path: str | os.PathLike[str], mode: str = "a") -> IO[Any]:
    """Open a file to write to it, made with mode 0600 if it is not there; "ab" without a buffer.

    Args:
        mode: "a" or "ab" to append, "a+" to read too; "w" or "wb" to empty it first.

    Raises:
        UnsafeFileError: it is there and is a link, has another name, or is no regular file; OSError: cannot be opened.
    """
    flags = _FLAGS | os.O_CREAT | (os.O_APPEND if "a" in mode else 0) | (os.O_RDWR if "+" in mode else os.O_WRONLY)
    if os.path.islink(path):  # each system has an error of its own for it
        raise UnsafeFileError(f"{path} is a link; expected a file of its own")
    descriptor = os.open(path, flags, _PRIVATE)
    try:
        _check_alone(descriptor, path)
        if "w" in mode:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    text = None if "b" in mode else "utf-8"
    return open(descriptor, mode, buffering=-1 if text else 0, encoding=text)


def replace_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a whole file, mode 0600, in place of what has its name; no reader sees a part of it.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
    temporary.unlink(missing_ok=True)  # remains of a killed process, or a link
    descriptor = os.open(temporary, _FLAGS | os.O_CREAT | os.O_EXCL | os.O_WRONLY, _PRIVATE)
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode("utf-8", errors="replace") if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def own_folder(path: Path) -> Path:
    """Return a folder of mode 0700 that belongs to this user, made if it is not there; its parent may be anyone's.

    Raises:
        UnsafeFileError: it is a link, belongs to another user, or others may write it; OSError: cannot be made.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise UnsafeFileError(f"{path} is a link or a file; expected a folder of {me()}") from None
        if found.st_uid != os.geteuid():
            raise UnsafeFileError(f"{path} belongs to {owner(found.st_uid)}; expected a folder of {me()}") from None
        if stat.S_IMODE(found.st_mode) & 0o022:
            raise UnsafeFileError(f"{path} may be written by others; expected mode 0700 (chmod 700 {path})") from None
    return path


def check_folder(path: Path) -> None:
    """Refuse a folder that somebody else has made a link (UnsafeFileError); a link of one's own may lead elsewhere."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) and found.st_uid != os.geteuid():
        raise UnsafeFileError(f"{path} is a link of {owner(found.st_uid)}; expected a folder, or a link of {me()}")


def foreign_owner(path: Path) -> str | None:
    """Return who owns a folder, if files that this process makes in it belong to somebody else than that.

    On disks that give all files one owner, such as those of buckets, everything is one's own.
    """
    owned_by = path.stat().st_uid
    if owned_by == os.geteuid():
        return None
    probe = path / f".owner.{os.getpid()}"
    try:
        descriptor = os.open(probe, _FLAGS | os.O_CREAT | os.O_EXCL | os.O_WRONLY, _PRIVATE)
    except OSError:
        return owner(owned_by)
    try:
        return None if os.fstat(descriptor).st_uid == owned_by else owner(owned_by)
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


def owner(number: int) -> str:
    """Return the name of a user, or the number where there is none."""
    import pwd

    try:
        return f"user {pwd.getpwuid(number).pw_name!r}"
    except KeyError:
        return f"user {number}"


def me() -> str:
    """Return the user of this process."""
    return owner(os.geteuid())


def _check_alone(descriptor: int, path: str | os.PathLike[str]) -> None:
    found = os.fstat(descriptor)
    if stat.S_ISCHR(found.st_mode):  # /dev/null, /dev/full: only root can put a device in place of a file
        return
    try:
        check_regular(found.st_mode)
    except BoundsError as error:
        raise UnsafeFileError(f"{path}: {error}") from None
    if found.st_nlink > 1:
        raise UnsafeFileError(f"{path} has another name (a hard link), whose content would change too; copy it")
