"""The collector of garbage, and numpy's threads, kept out of the way of imports and of tracing."""

import functools
import gc
import os
from collections.abc import Generator
from contextlib import contextmanager

_OBJECTS = 50_000  # allocated objects between two collections


@contextmanager
def many_imports() -> Generator[None]:
    """Keep the garbage collector from looking through what is imported: now again and again, later with all else.

    What jax, flax and the roles import are objects by the hundred thousand, none of which is garbage; to look through
    them takes a seventh of the time of the imports.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _freeze_once()
        if enabled:
            gc.enable()


@functools.cache
def _freeze_once() -> None:
    """Put what there is beside the collector; garbage stays there as well, so not again later."""
    gc.freeze()


def collect_rarely() -> None:
    """Let more objects be made between two collections than Python's 700, each of which calls into XLA too.

    For commands whose time is that of imports and of tracing, which make millions of objects that stay.
    """
    gc.set_threshold(_OBJECTS, 20, 20)


def no_blas_threads() -> None:
    """Let numpy, if it is not imported yet, make no threads for its own products, unless the user says how many.

    For commands whose products are XLA's: such threads are busy while they wait for work, a tenth of a second and more
    from numpy's import on.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
