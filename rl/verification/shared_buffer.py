"""Memory shared by the pool and one worker, into which the worker writes each result.

A worker that hangs or dies can no longer answer; what it had finished, and which item it was scoring, is read here. No
system call is needed per item, so cheap scorers run at full speed.
"""

import mmap
import os
import tempfile

import numpy as np

from rl.protocol.messages import ScoreStatus

__all__ = ["PENDING", "STATUSES", "ResultBuffer"]

PENDING = 0
STATUSES: tuple[ScoreStatus, ...] = ("ok", "error", "timeout", "crash")  # coded 1, 2, 3, 4

_ITEM = np.dtype([("reward", "<f8"), ("seconds", "<f8"), ("status", "u1")], align=True)
_HEADER = np.dtype([("started", "<f8")])


class ResultBuffer:
    """`capacity` result rows, and when the current item started (`time.monotonic`)."""

    def __init__(self, fd: int, capacity: int):
        size = _HEADER.itemsize + capacity * _ITEM.itemsize
        self.fd = fd
        self.capacity = capacity
        self._memory = mmap.mmap(fd, size)
        self._header = np.frombuffer(self._memory, _HEADER, count=1)
        self.rows = np.frombuffer(self._memory, _ITEM, count=capacity, offset=_HEADER.itemsize)

    @classmethod
    def create(cls, capacity: int) -> "ResultBuffer":
        """Create a buffer in an unlinked file; `fd` may be inherited by the worker."""
        with tempfile.TemporaryFile() as file:
            file.truncate(_HEADER.itemsize + capacity * _ITEM.itemsize)
            return cls(os.dup(file.fileno()), capacity)

    @property
    def started(self) -> float:
        """Time at which the current item was started."""
        return float(self._header["started"][0])

    @started.setter
    def started(self, now: float) -> None:
        self._header["started"][0] = now

    def clear(self) -> None:
        """Mark every row as pending."""
        self.rows["status"] = PENDING

    def write(self, index: int, status: ScoreStatus, reward: float, seconds: float) -> None:
        """Write the result of item `index`, the status last: it marks the row as complete."""
        row = self.rows[index]
        row["reward"] = reward
        row["seconds"] = seconds
        row["status"] = STATUSES.index(status) + 1

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last view of it."""
        os.close(self.fd)
