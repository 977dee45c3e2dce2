"""Buffers as flat views of bytes, and lists of them in batched system calls."""

from collections.abc import Buffer, Callable

import numpy as np

_IOV = 1024  # buffers per system call: IOV_MAX of Linux and macOS


def view_of(buffer: Buffer) -> memoryview:
    """Return a buffer's bytes without a copy, also of numpy arrays of any dtype (ValueError: not C-contiguous)."""
    if isinstance(buffer, np.ndarray):  # uint8, as bfloat16 has no buffer protocol
        if not buffer.flags.c_contiguous:
            raise ValueError(f"an array of shape {buffer.shape} that is not C-contiguous cannot be sent without a copy")
        return memoryview(buffer.reshape(-1).view(np.uint8))
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("a buffer that is not C-contiguous cannot be sent without a copy")
    return view.cast("B") if view.nbytes else memoryview(b"")


def transfer_batches(views: list[memoryview], transfer: Callable[[list[memoryview]], int]) -> None:
    """Transfer all bytes by repeated calls `transfer(views) -> bytes done`, each with at most `_IOV` views."""
    views = [view for view in views if view.nbytes]
    at = 0
    while at < len(views):
        count = transfer(views[at : at + _IOV])
        while count and count >= views[at].nbytes:
            count -= views[at].nbytes
            at += 1
        if count:
            views[at] = views[at][count:]
