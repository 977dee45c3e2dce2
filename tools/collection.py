"""How often Python looks for cycles of garbage."""

import gc

_OBJECTS = 50_000


def collect_rarely() -> None:
    """Let more objects be made between two collections than Python's 700, each of which calls into XLA too.

    For commands whose time is that of imports and of tracing, which make millions of objects that stay.
    """
    gc.set_threshold(_OBJECTS, 20, 20)
