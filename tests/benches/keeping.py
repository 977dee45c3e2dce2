"""Figures of a section that Ctrl-C ends: those that there are by then."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from tools.bench.harness.sections import Interrupted


@contextlib.contextmanager
def keeping(found: Any, figures: Callable[[], Any]) -> Generator[None]:
    """Keep `figures()` of what a section has found when Ctrl-C ends the block, unless `found` is empty."""
    try:
        yield
    except KeyboardInterrupt:
        if not found:
            raise
        raise Interrupted(figures()) from None
