"""Progress of bytes on the terminal: a bar, or elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_EVERY, _EVERY_OF_BAR = 5.0, 0.1  # seconds


@contextmanager
def bytes_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of the bytes done and of all bytes, which shows them on standard error."""
    with ExitStack() as stack:
        bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
            bar = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
            task = bar.add_task(title, total=None)
        began = shown = time.monotonic()
        ended = False

        def show(done: int, total: int) -> None:
            nonlocal shown, ended
            now = time.monotonic()
            if now - shown < (_EVERY if bar is None else _EVERY_OF_BAR) and (ended or done < total):
                return
            shown, ended = now, done >= total
            if bar is not None:
                bar.update(task, completed=done, total=total)
                return
            megabytes, rate = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB", done / max(now - began, 1e-9)
            print(f"{title}: {megabytes}, {rate / 1e6:,.0f} MB/s", file=sys.stderr, flush=True)

        yield show
