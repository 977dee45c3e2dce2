"""Read-only numpy arrays over memory that something else owns."""

import numpy as np

from rl.parameter_server.fingerprint import as_bytes
from rl.parameter_server.transport.shared_memory import SharedSegment


class _Owned:
    """Buffer for `np.asarray`: arrays over it keep the owner alive and are read-only."""

    def __init__(self, array: np.ndarray, owner: object) -> None:
        self.owner = (array, owner)
        self.__array_interface__ = {**as_bytes(array).__array_interface__, "data": (address_of(array), True)}


def read_only(array: np.ndarray, owner: object) -> np.ndarray:
    """Return the array C-contiguous and read-only; without a copy, keeping the owner alive, if it was contiguous."""
    if not array.flags.c_contiguous or owner is None or not array.size:
        view = np.asarray(array, order="C").view()
        view.flags.writeable = False
        return view
    return np.asarray(_Owned(array, owner)).view(array.dtype).reshape(array.shape)


def as_unsigned(array: np.ndarray) -> np.ndarray:
    """Return the same memory as unsigned integers, which numpy copies faster than custom dtypes."""
    return array.view(f"u{array.itemsize}") if array.itemsize in (1, 2, 4, 8) else array


def address_of(array: np.ndarray) -> int:
    """Return where the array's memory begins."""
    return array.__array_interface__["data"][0]


def lies_in(array: np.ndarray, segment: SharedSegment) -> bool:
    """Return True if the array's memory is a part of the segment; False for an empty array."""
    start = address_of(array) - address_of(segment.buffer)
    return array.size > 0 and 0 <= start <= segment.nbytes - array.nbytes
