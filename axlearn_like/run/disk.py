"""Full disks: one message that names the place and says that nothing is lost."""

import errno
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mesh.errors import UserError

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_WORDS = ("No space left on device", "Disk quota exceeded")


class DiskFull(UserError):
    """Error: the disk of `path` is full; `point` is where the same command will resume."""

    def __init__(self, path: str, point: str = "the last checkpoint"):
        super().__init__(path, point)
        self.path, self.point = path, point

    def __str__(self) -> str:
        return (
            f"no space left on device: {self.path}; free some and run the same command again: "
            f"it resumes from {self.point}"
        )


def is_full_disk(error: BaseException | None) -> bool:
    """Return True if a full disk is the root cause. TensorStore says so only in its message.

    An error of a thread that is raised again while it is handled is among its own causes.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        numbered = isinstance(error, OSError) and error.errno in _NUMBERS
        if numbered or isinstance(error, DiskFull) or any(words in str(error) for words in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def raising_disk_full(path: str | Path) -> Iterator[None]:
    """Turn an OSError of a full disk into DiskFull."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NUMBERS:
            raise
        raise DiskFull(str(path)) from error


def quieten_full_disk() -> None:
    """Silence the logs of a full disk, which is raised as an error.

    Orbax logs a screen for each of its threads that found no room, and asyncio one for each of their writes, after the
    first, that failed; TensorStore prints one more for each write that ends after its thread.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    if _not_of_full_disk not in loggers[0].filters:
        for logger in loggers:
            logger.addFilter(_not_of_full_disk)
        sys.unraisablehook = partial(_but_for_late_writes, sys.unraisablehook)


def _not_of_full_disk(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not (is_full_disk(error) or any(words in record.getMessage() for words in _WORDS))


def _but_for_late_writes(hook: Callable[[Any], Any], what: Any) -> None:
    if not (what.exc_type is RuntimeError and str(what.exc_value) == "Event loop is closed"):
        hook(what)
