"""Memory that the process has freed, kept for its next step where its devices are the CPU of the host."""

import ctypes
from contextlib import suppress

_ARENAS, _MMAP_MAX, _TRIM_THRESHOLD = -8, -4, -1  # names of glibc's mallopt (malloc.h)
_NEVER = 2**31 - 1  # bytes


def keep_freed_memory() -> bool:
    """Keep what is freed for the next allocation, instead of giving it back to the kernel; call it before JAX starts.

    XLA's CPU code allocates the temporary memory of a step in one piece and frees it at the step's end. As it comes
    from the kernel page by page, and zeroed, that can be a quarter of a small step's time; a step that repeats needs
    the same piece again. So the process keeps the memory of its largest step until its end, a few times over where
    one step takes it before the last has given it back. Threads that exist already keep arenas of their own, whose
    large allocations come from the kernel in any case. No effect without glibc.

    Returns:
        True if it has an effect.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        return all([mallopt(_ARENAS, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, _NEVER)])
    return False
