"""A file written from front to back past the page cache: large files cost no memory and little processor time.

Where the file system cannot (tmpfs), or Python has no way to ask for it (macOS), it is written like any other.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

_ALIGNMENT = 4096
_BUFFER = 4 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """A new file at `path`; as a context, it is on the disk after the `with` block, or cut off after an error."""

    def __init__(self, path: Path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(path, flags | _DIRECT, 0o666)
        except OSError:
            self._file = os.open(path, flags, 0o666)
        self._pages = mmap.mmap(-1, _BUFFER)  # begins at a page, as the direct way asks for
        self._buffer = np.frombuffer(self._pages, np.uint8)
        self._held = self._written = 0

    @property
    def size(self) -> int:
        """The bytes that were appended."""
        return self._written + self._held

    def append(self, block: np.ndarray | bytes) -> None:
        """Write the bytes of a contiguous array after all others."""
        data = np.frombuffer(block, np.uint8) if isinstance(block, bytes) else block.reshape(-1).view(np.uint8)
        while len(data):
            count = min(len(data), _BUFFER - self._held)
            self._buffer[self._held : self._held + count] = data[:count]
            self._held, data = self._held + count, data[count:]
            if self._held == _BUFFER:
                self._flush(_BUFFER)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                size = self.size
                if self._held:
                    self._buffer[self._held :] = 0
                    self._flush(-(-self._held // _ALIGNMENT) * _ALIGNMENT)
                os.ftruncate(self._file, size)
                os.fsync(self._file)
        finally:
            os.close(self._file)
            del self._buffer
            with contextlib.suppress(BufferError):
                self._pages.close()

    def _flush(self, count: int) -> None:
        done = 0
        while done < count:
            try:
                done += os.pwrite(self._file, memoryview(self._pages)[done:count], self._written + done)
            except OSError as error:
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & _DIRECT:
                    raise
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)  # the file system has other alignments
        self._written, self._held = self._written + self._held, 0
