"""Files that came from anywhere, such as a downloaded `config.json`: regular ones, read up to a size.

A pipe would block its reader for ever, a link to a device would fill memory, and deep JSON ends Python's stack.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL = 16 << 20  # bytes; far more than any config has
LARGE = 128 << 20  # limit for tokenizers and lists of files; the largest in use have a third
_MOST_CONTAINERS = 1_000_000  # objects and lists in JSON: each takes some 64 bytes, for two characters
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class BoundsError(OSError):
    """A file that is not read: not a regular one, or too large. The message does not name the file."""


def read_bounded(path: str | os.PathLike[str], most: int = SMALL) -> bytes:
    """Return the content of a regular file; links to one are followed, as caches of downloads are made of them.

    Raises:
        BoundsError: it is a directory, pipe, device or socket, or larger than `most` bytes; OSError: cannot be read.
    """
    check_regular(os.stat(path).st_mode)  # opening a device can already do something
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        check_regular(found.st_mode)
        if found.st_size > most:
            raise BoundsError(f"expected at most {most:,} bytes, got {found.st_size:,}")
        left, parts = most + 1, list[bytes]()
        while left and (part := file.read(min(left, max(1 << 16, found.st_size + 1)))):
            parts.append(part)
            left -= len(part)
    if not left:  # file grows, or its size is unknown to the system
        raise BoundsError(f"expected at most {most:,} bytes, got more")
    return b"".join(parts)


def read_json(
    path: str | os.PathLike[str],
    most: int = SMALL,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return the value in a JSON file; see `read_bounded` and `parse_json`."""
    return parse_json(read_bounded(path, most), pairs=pairs)


def parse_json(
    data: bytes,
    *,
    containers: int = _MOST_CONTAINERS,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return the value of JSON in UTF-8.

    Args:
        containers: objects and lists that it may have.
        pairs: makes each object of its pairs.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or has more objects and lists.
    """
    found = data.count(b"{") + data.count(b"[")
    if found > containers:
        raise ValueError(f"expected at most {containers:,} objects and lists, got {found:,}")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_text(path: str | os.PathLike[str], most: int = SMALL) -> str:
    """Return the text of a file in UTF-8; see `read_bounded`. UnicodeDecodeError: it is none."""
    return read_bounded(path, most).decode("utf-8")


def is_readable(path: Path) -> bool:
    """Return True for a regular file; False too where it cannot be seen."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def check_links(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder with a link to a file outside of it: what is copied from there could be any file of the user's.

    The Hub's cache is made of links, from `models--NAME/snapshots/REVISION` to `models--NAME/blobs`: these are fine.

    Raises:
        BoundsError: names the link and its target; OSError: the folder cannot be listed.
    """
    root = Path(os.path.realpath(folder))
    if root.parent.name == "snapshots" and (root.parents[1] / "blobs").is_dir():
        root = root.parents[1]
    with os.scandir(folder) as entries:
        links = sorted(entry.path for entry in entries if entry.is_symlink() and not entry.is_dir())
    for link in links:
        if not Path(os.path.realpath(link)).is_relative_to(root):
            raise BoundsError(
                f"{link} is a link to {os.readlink(link)!r:.200}, outside of {root}; such a link can give away any "
                "file that you may read: copy the file into the directory if you know it"
            )


def check_regular(mode: int) -> None:
    """Refuse the mode of anything but a regular file (BoundsError)."""
    if not stat.S_ISREG(mode):
        kind = next((name for fits, name in _KINDS if fits(mode)), "another kind of file")
        raise BoundsError(f"expected a regular file, got {kind}")
