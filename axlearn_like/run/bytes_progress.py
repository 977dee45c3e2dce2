"""Progress of bytes on the terminal: a bar, or elsewhere a line now and then."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY = 5.0  # seconds between lines


@contextmanager
def bytes_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of the bytes done and of all bytes, which shows them on standard error."""
    if not sys.stderr.isatty():
        yield _lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(title: str) -> Callable[[int, int], None]:
    began, shown = time.monotonic(), -math.inf

    def show(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= _EVERY or done >= total:
            shown = now
            rate = done / max(now - began, 1e-9)
            print(
                f"{title}: {done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:,.0f} MB/s",
                file=sys.stderr,
                flush=True,
            )

    return show
