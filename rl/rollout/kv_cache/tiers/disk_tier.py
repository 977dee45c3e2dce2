"""Pages in a file on a local disk: a ring of bytes, in which the newest overwrites the oldest.

The file has no name: it is gone with the process, however that ends. One thread reads and writes it.
"""

import os
import tempfile
from collections import OrderedDict
from pathlib import Path

from mesh import UserError
from rl.rollout.kv_cache.tiers.page_form import StoredPage

Place = tuple[int, int, int]  # offset, bytes, checksum


class DiskTier:
    """Pages by digest."""

    def __init__(self, folder: str, limit: int):
        """Open the file of at most `limit` bytes in a folder, best on a local disk (UserError: none can be made)."""
        self._limit, self._head = limit, 0
        self._places: OrderedDict[bytes, Place] = OrderedDict()  # ordered as written, the oldest first
        self.used = 0  # bytes of pages
        try:
            self._file = tempfile.TemporaryFile(dir=Path(folder), prefix="kv-pages-")
        except OSError as error:
            raise UserError(f"RolloutEngine.tiers.disk={folder!r}: no file can be made there ({error})") from error

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file."""
        return self._file.fileno()

    def write(self, digest: bytes, page: StoredPage) -> bool:
        """Write a page over the oldest ones; returns False if there is no room for it, or the disk is full."""
        size = len(page.blob)
        if size > self._limit:
            return False
        if self._head + size > self._limit:
            self._free(self._head, self._limit)
            self._head = 0
        self._free(self._head, self._head + size)
        try:
            written = os.pwrite(self.descriptor, page.blob, self._head)
        except OSError:
            written = 0
        if written != size:
            return False
        self._places[digest] = (self._head, size, page.checksum)
        self._head += size
        self.used += size
        return True

    def read(self, digest: bytes) -> StoredPage | None:
        """Return a page, whose checksum the caller compares; None: it is not there, or cannot be read."""
        place = self._places.get(digest)
        if place is None:
            return None
        offset, size, checksum = place
        try:
            return StoredPage(os.pread(self.descriptor, size, offset), checksum)
        except (OSError, MemoryError):
            return None

    def forget(self, digest: bytes) -> None:
        """Forget a page, if it is there."""
        if (place := self._places.pop(digest, None)) is not None:
            self.used -= place[1]

    def clear(self) -> None:
        """Forget all pages, and give back the room on the disk."""
        self._places.clear()
        self._head = self.used = 0
        os.ftruncate(self.descriptor, 0)

    def _free(self, start: int, end: int) -> None:
        """Forget the pages that overlap these bytes: the oldest ones that are not behind them."""
        while self._places:
            digest, (offset, size, _) = next(iter(self._places.items()))
            if offset >= end or offset + size <= start:
                return
            self.forget(digest)
