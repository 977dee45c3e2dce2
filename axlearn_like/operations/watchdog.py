"""Watchdog thread: notices when a run makes no progress, writes down where it hangs, and may end it.

A collective whose partner is gone, a bucket that does not answer, a data source in a deadlock: none of these raises.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import override

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.run.events import EventLog
from mesh.files.written import open_written

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: worth trying again


class Watchdog(Configurable):
    """Watch over a block: `with watchdog: ... watchdog.beat(step)`.

    It needs Python's global lock for a moment: a library that hangs while it holds that lock is not noticed.
    """

    class Config(ConfigBase["Watchdog"]):
        dump_after: float = 900.0  # seconds without a completed step, evaluation or checkpoint
        exit_after: float | None = None  # further seconds until the process is ended with status 75; None: never
        starting: float = 3600.0  # seconds allowed instead of `dump_after` while the run starts or a step is compiled

        @override
        def check_fields(self) -> None:
            for field in ("dump_after", "exit_after", "starting"):
                seconds = getattr(self, field)
                self.require(field, seconds is None or seconds > 0, "seconds, more than 0")

    def __init__(self, cfg: Config, *, run_dir: Path, events: EventLog, doing: Callable[[], str]):
        """`doing` returns the cause that the time is being charged to (see goodput.py)."""
        self.path = run_dir / "stacks.txt"
        self._cfg, self._events, self._doing = cfg, events, doing
        self._beats, self._step = 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, step: int) -> None:
        """Report that something was completed. Costs next to nothing: the thread takes the time."""
        self._step = step
        self._beats += 1

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        period = min(5.0, max(0.05, self._cfg.dump_after / 20))
        seen, since, woke, dumped = (-1, True), 0.0, time.monotonic(), 0.0
        while not self._ended.wait(period):
            now = time.monotonic()
            stopped = now - woke > self._cfg.dump_after / 2  # the whole process was, by a debugger or a scheduler
            woke, starting = now, self._doing() in ("startup", "compile")
            if (self._beats, starting) != seen or stopped:
                if dumped:
                    self._write("resumed", f"the run makes progress again: step {self._step}")
                seen, since, dumped = (self._beats, starting), now, 0.0
                continue
            limit = self._cfg.starting if starting else self._cfg.dump_after
            if not dumped and now - since >= limit:
                self._dump(now - since)
                dumped = now
            elif dumped and self._cfg.exit_after is not None and now - dumped >= self._cfg.exit_after:
                self._write("exit", f"still nothing; ending this process with status {EXIT_CODE}")
                os._exit(EXIT_CODE)

    def _dump(self, silent: float) -> None:
        message = f"nothing completed for {silent:.0f} s after step {self._step}, during {self._doing()}"
        self._write("stacks", f"{message}; stacks of all threads are in {self.path}")
        with suppress(OSError), open_written(self.path) as file:
            file.write(f"{time.strftime('%F %T')}: {message}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
        with suppress(OSError):
            faulthandler.dump_traceback(2, all_threads=True)  # the process's own: a notebook's stderr is no file

    def _write(self, what: str, message: str) -> None:
        """Write to the event log and the terminal; a failure of either does not stop the watchdog."""
        with suppress(Exception):
            self._events.append("trainer", "watchdog", what=what, step=self._step, during=self._doing())
        with suppress(Exception):
            print(f"watchdog: {message}", file=sys.__stderr__, flush=True)
