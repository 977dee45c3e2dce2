"""Many modules imported at once."""

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
        if not gc.get_freeze_count():  # once: what is garbage by then stays, too
            gc.freeze()
        if enabled:
            gc.enable()
