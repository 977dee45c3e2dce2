"""Fault injection: one worker is killed in the middle of a run, and the time until it is replaced is measured.

It is no part of an experiment's config: `axl rl --kill-worker-after` and tests ask for it.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import ray

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail

Say = Callable[[str], None]


class FaultInjection:
    """A SIGKILL to the last worker, once in a run, resumed or not."""

    def __init__(self, run: RunDirectory, *, workers: int, after_update: int | None):
        """`after_update`: the number of completed updates at which the worker is killed; None: never."""
        self.name = f"worker-{workers - 1}"
        self.target: str | None = None  # the worker's name from its death until it is replaced
        done = any(row["event"] == "kill" and row["role"] == "driver" for row in JsonlTail(run.events_path).new_rows())
        self._at = None if done or not workers else after_update
        self._message, self._time, self._started = "", 0.0, False

    def due(self, step: int) -> bool:
        """Return True if the worker has to be killed now, at `step` completed updates."""
        return self._at is not None and step >= self._at

    def kill(self, pid: int, actor: Any, step: int, log: EventLog) -> None:
        """Kill the worker, and log an event `kill`."""
        self._at, self.target = None, self.name
        self._message, self._time = f"killed {self.name} (pid {pid}) at update {step}", time.time()
        log.append("driver", "kill", target=self.name, pid=pid, step=step)
        if os.environ.get("RAY_ADDRESS"):
            ray.kill(actor, no_restart=False)  # process may be on another machine
        else:
            os.kill(pid, signal.SIGKILL)

    def read_event(self, row: dict[str, Any], say: Say) -> None:
        """Report the worker as replaced when its next incarnation has submitted rollouts."""
        if self.target is None or row["role"] != self.target or row["time"] < self._time:
            return
        self._started = self._started or row["event"] == "start"
        if self._started and row["event"] == "score":
            say(f"{self._message}; replaced after {row['time'] - self._time:.1f} s")
            self.target = None

    def close(self, say: Say) -> None:
        """Report a killed worker that was not replaced before the run ended."""
        if self.target is not None:
            say(f"{self._message}; the run ended before it was replaced")
            self.target = None
