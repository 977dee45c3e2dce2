"""Reuse of host memory for the next version of the weights."""

import collections
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes; required by XLA's CPU backend for zero-copy use
_SMALL = 1 << 16  # bytes; smaller buffers are not pooled


class BufferPool:
    """Pool of host buffers: versions come and go in the same sizes, so a buffer without references is reused.

    The page faults of a new gigabyte take longer than everything else that is done with its bytes. Thread-safe. It
    never holds more than was in use at one time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[np.ndarray] = []
        self._returned: collections.deque[np.ndarray] = collections.deque()  # filled by finalizers, which never block

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return an array as `np.empty`, aligned for CPU devices; without views its memory is the pool's again."""
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes < _SMALL:
            return np.empty(shape, kind)
        lent = _Lent(memory := self._find(nbytes))
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return np.asarray(lent).view(kind).reshape(shape)

    def _find(self, nbytes: int) -> np.ndarray:
        with self._lock:
            while self._returned:
                self._spare.append(self._returned.popleft())
            for at, memory in enumerate(self._spare):
                if memory.nbytes == nbytes:
                    return self._spare.pop(at)
            left = nbytes  # sizes have changed: release spare memory
            while self._spare and left > 0:
                left -= self._spare.pop(0).nbytes
        whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -whole.__array_interface__["data"][0] % ALIGNMENT
        return whole[start : start + nbytes]


class _Lent:
    """Owner that arrays over a buffer keep alive."""

    def __init__(self, memory: np.ndarray):
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory


BUFFERS = BufferPool()  # buffers of this process
