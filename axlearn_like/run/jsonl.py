"""Tail of a JSONL file that other processes write: the new rows, without reading all again."""

from pathlib import Path
from typing import Any

from axlearn_like.run.metrics import ROWS, parse_row
from mesh.files.bounded import is_readable


class JsonlTail:
    """Reader of the new rows of a file that may not exist yet and may be replaced by a repaired one."""

    def __init__(self, path: str | Path, *, from_end: bool = False):
        """Start at the beginning of the file, or, with `from_end`, after the rows that it has now."""
        self._path = Path(path)
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset, self.again = 0, False
        if from_end and self._path.exists():
            status = self._path.stat()
            self._file, self._offset = (status.st_dev, status.st_ino), status.st_size

    def new_rows(self) -> list[dict[str, Any]]:
        """Return the rows added since the last call; all rows once more if the file was replaced or cut."""
        return [row for line in self.new_lines() for row in parse_row(line)]

    def new_lines(self) -> list[bytes]:
        """Return the whole lines added since the last call, whatever stands in them; `again`: it begins once more."""
        self.again = False
        if not is_readable(self._path):
            return []
        try:
            with open(self._path, "rb") as file:
                status = self._path.stat()
                known = (status.st_dev, status.st_ino)
                if known != self._file or status.st_size < self._offset:
                    self._file, self._offset, self.again = known, 0, True
                file.seek(self._offset)
                data = file.read(ROWS)
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]  # the last line may not be complete yet
        self._offset += len(whole)
        return whole.splitlines()
