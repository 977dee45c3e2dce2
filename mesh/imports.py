"""Many modules imported at once."""

import functools
import gc
from collections.abc import Generator
from contextlib import contextmanager


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
