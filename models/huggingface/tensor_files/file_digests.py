"""Digests of a file's blocks, noted once; afterwards each block is compared before any byte of it is used."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from models.huggingface.rows import ConversionError

BLOCK = 16 << 20  # bytes; a reader of a part of a file reads no more than this beside it
_BUFFER = 1 << 20  # bytes that are summed at a time: they stay in the processor's cache
_THREADS = 4


class FileDigests:
    """Size and digests that one file had."""

    def __init__(self, path: Path, size: int, block: int, digests: Sequence[str]):
        """Expect a file of that size. ConversionError: it has another, or is missing.

        Args:
            path: the file.
            size: bytes of it.
            block: bytes of a block.
            digests: XXH3-64 of each block, in hexadecimal.
        """
        self.path, self.size, self.block, self.digests = path, size, block, tuple(digests)
        self._equal, self._lock = bytearray(len(self.digests)), threading.Lock()
        try:
            found = path.stat().st_size
        except OSError as error:
            raise ConversionError(f"{path}: cannot be read ({error.strerror})") from None
        if found != size:
            raise ConversionError(f"{path}: expected {size:,} bytes, as when it was imported, got {found:,}")
        if len(self.digests) != -(-size // block):
            raise ConversionError(f"{path}: expected digests of {-(-size // block)} blocks, got {len(self.digests)}")

    @classmethod
    def of(cls, path: Path, progress: Callable[[int], None] = lambda nbytes: None) -> "FileDigests":
        """Read a whole file, several blocks at a time; `progress` is called with the bytes of each."""
        size = path.stat().st_size

        def digest(number: int) -> str:
            found = _digest(path, number, BLOCK)
            progress(min(BLOCK, size - number * BLOCK))
            return found

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="digest") as pool:
            return cls(path, size, BLOCK, list(pool.map(digest, range(-(-size // BLOCK)))))

    def check(self, start: int, nbytes: int) -> None:
        """Compare the blocks that hold these bytes, each once (ConversionError)."""
        for number in range(start // self.block, -(-(start + nbytes) // self.block)):
            with self._lock:
                if not self._equal[number]:
                    self._compare(number)
                    self._equal[number] = True

    def _compare(self, number: int) -> None:
        if _digest(self.path, number, self.block) != self.digests[number]:
            first, last = number * self.block, min((number + 1) * self.block, self.size)
            raise ConversionError(
                f"{self.path}: bytes {first:,} to {last:,} are not those that were imported: the file was changed, or "
                "is damaged; import the model again"
            )


def _digest(path: Path, number: int, block: int) -> str:
    """Return the digest of one block."""
    found, view, left = xxhash.xxh3_64(), memoryview(bytearray(_BUFFER)), block
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), number * block, 2 * block, os.POSIX_FADV_WILLNEED)  # next one, too
        file.seek(number * block)
        while count := file.readinto(view[: min(left, _BUFFER)]):
            found.update(view[:count])
            left -= count
    return found.hexdigest()
