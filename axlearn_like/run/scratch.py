"""Folders for the length of a process. One that was killed leaves them; the next that makes one of a kind removes them.

An owner is known by its pid, the time at which it started and its pid namespace, so that a pid which is used again is
another process, and what a container cannot see is left alone. Without /proc nothing is removed.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def make_scratch(kind: str, parent: str | os.PathLike[str] | None = None) -> Path:
    """Return a new private folder of this process, and remove those of this kind whose owners are dead.

    Args:
        kind: letters and hyphens; the folder's name begins with `axl-KIND-`.
        parent: its parent; None: the directory of temporary files.
    """
    folder = Path(tempfile.gettempdir() if parent is None else parent)
    for path in folder.glob(f"axl-{kind}-*-*-*-*"):
        if _is_left(path, len(kind)):
            shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"axl-{kind}-{_identity(os.getpid())}-", dir=folder))


@contextmanager
def scratch(kind: str, parent: str | os.PathLike[str] | None = None) -> Generator[Path]:
    """`make_scratch`, removed at the end of the block."""
    folder = make_scratch(kind, parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_left(path: Path, length: int) -> bool:
    """Return True for a folder of this user's whose owner was of this namespace and has ended."""
    owner = path.name[length + 5 :].rpartition("-")[0]  # part between `axl-KIND-` and the suffix of mkdtemp
    pid, _, rest = owner.partition("-")
    if not pid.isdecimal() or rest.partition("-")[2] != _namespace():
        return False
    with contextlib.suppress(OSError):
        facts = path.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and owner != _identity(int(pid))
    return False


def _identity(pid: int) -> str:
    """Return pid, start and namespace of a process; the start is 0 where there is no such process."""
    return f"{pid}-{_start(pid)}-{_namespace()}"


def _start(pid: int) -> int:
    """Return when a process started: ticks since the boot, which no change of the clock moves."""
    try:
        # Behind the name, which may have spaces and brackets.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"
