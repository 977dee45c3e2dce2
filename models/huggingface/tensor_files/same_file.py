"""A file that is there already, compared with what would be written."""

from pathlib import Path
from types import TracebackType

import numpy as np

from models.huggingface.rows import ConversionError


class SameFile:
    """The counterpart of `DirectFile` that writes nothing: each append must find its bytes in the file."""

    def __init__(self, path: Path):
        self._path = path
        self._file = open(path, "rb", buffering=0)
        self.size = 0

    def append(self, block: np.ndarray | bytes) -> None:
        """Compare the next bytes (ConversionError: others, or no more)."""
        data = np.frombuffer(block, np.uint8) if isinstance(block, bytes) else block.reshape(-1).view(np.uint8)
        there = np.fromfile(self._file, np.uint8, len(data))
        if not np.array_equal(there, data):
            raise self._differs()
        self.size += len(data)

    def __enter__(self) -> "SameFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        more = self._file.read(1) if error is None else b""
        self._file.close()
        if more:
            raise self._differs()

    def _differs(self) -> ConversionError:
        return ConversionError(f"{self._path} differs behind byte {self.size:,}")
