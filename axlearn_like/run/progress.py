"""Progress on the terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from mesh.errors import printable

_MANY = 16  # updates whose mean says how long the others take


def one_line(text: object, most: int) -> str:
    """Return a text that somebody else wrote on one line of at most so many characters, fit for a terminal."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= most else f"{line[: most - 3]}..."


class Progress:
    """Step, loss, speed and time left: a bar on a terminal, elsewhere a line now and then.

    Lines come after some seconds and after a tenth of the time so far: a day's run makes a hundred. Time left is told
    from the fourth update on: at the median pace, in which an update that compiles does not count, and from the 16th at
    the mean pace of the latter half of those so far, in which pauses do.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        title: str = "train",
        every_seconds: float = 5.0,
        stream: TextIO | None = None,
    ):
        self._total, self._start, self._title = total, start, title
        self._every_seconds = every_seconds
        self._stream = sys.stderr if stream is None else stream
        self._first: tuple[float, int, float] | None = None  # time, step and tokens of the first update shown
        self._marks: list[tuple[float, int]] = []  # time and step of updates 1, 2, 4, 8, ...
        self._early: list[float] = []  # seconds of a step, of the first updates
        self._latest = (0.0, 0)  # time and step
        self._shown = 0  # updates
        self._printed_at = -math.inf
        self._tokens = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(file=self._stream),
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total, completed=self._start, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def extend(self, steps: int) -> None:
        """Show so many more steps in all."""
        self._total += steps
        if self._bar is not None:
            self._bar.update(self._task, total=self._total)

    def update(self, step: int, *, loss: float | None = None, tokens: float = 0.0, note: str = "") -> None:
        """Show `step` of the total. `tokens`: processed since the last call."""
        self._tokens += tokens
        now = time.monotonic()
        # Speed counts from the first update on: before it lie start-up and compilation.
        began, first_step, first_tokens = self._first = self._first or (now, step, self._tokens)
        elapsed = max(now - began, 1e-9)
        notes = [note] if note else []
        notes += [] if loss is None else [f"loss {loss:.4f}"]
        if self._tokens and step > first_step:
            notes.append(f"{(self._tokens - first_tokens) / elapsed:,.0f} tok/s")
        if (left := self._left(now, step)) is not None:
            notes.append(f"{left:,.0f} s left")
        if self._bar is not None:
            self._bar.update(self._task, completed=step, note=", ".join(notes))
        elif now - self._printed_at >= max(self._every_seconds, elapsed / 10) or step >= self._total:
            self._printed_at = now
            line = ", ".join([f"{self._title}: step {step} of {self._total}", *notes])
            print(printable(line), file=self._stream, flush=True)

    def _left(self, now: float, step: int) -> float | None:
        """Return the seconds left; None: not known yet, or none."""
        self._shown += 1
        if self._shown & (self._shown - 1) == 0:
            self._marks.append((now, step))
        if 1 < self._shown < _MANY:
            self._early.append((now - self._latest[0]) / max(step - self._latest[1], 1))
        self._latest = (now, step)
        if self._shown < 4 or step >= self._total:
            return None
        pace = sorted(self._early)[len(self._early) // 2]
        if self._shown >= _MANY:
            began, first = self._marks[-2]
            pace = (now - began) / max(step - first, 1)
        return pace * (self._total - step)


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
