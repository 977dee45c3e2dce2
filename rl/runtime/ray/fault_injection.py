"""Fault injection: a worker is killed in the middle of a run, or roles by a trace; what follows is reported.

It is no part of an experiment's config: `axl rl --kill-worker-after`, `axl rl --trace` and tests ask for it.
"""

import os
import random
import signal
import time
from collections.abc import Mapping
from typing import Any

import ray

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail
from rl.runtime.simulated.failures import Faults
from rl.runtime.supervision.actors import Say


class FaultInjection:
    """SIGKILLs: one to the last worker, once in a run, resumed or not; and those of a trace."""

    def __init__(self, run: RunDirectory, *, workers: int, faults: Faults):
        """`faults`: what to inject; outlives the sessions of Ray of one command."""
        self._last = f"worker-{workers - 1}"
        self.target: str | None = None  # the worker's name from its death until it is replaced
        done = any(row["event"] == "kill" and row["role"] == "driver" for row in JsonlTail(run.events_path).new_rows())
        self._at = None if done or not workers else faults.after_update
        self._faults, self._workers, self._log = faults, workers, EventLog(run.events_path)
        self._random = random.Random(len(faults.trace))
        self._message, self._time, self._started = "", 0.0, False
        self._first: int | None = None  # updates before the first call

    def inject(self, step: int, pids: Mapping[str, int], actors: Mapping[str, Any]) -> None:
        """Kill what has to be killed now, at `step` completed updates; a trace begins with the next one."""
        self._first = step if self._first is None else self._first
        if self._at is not None and step >= self._at and self._last in pids:
            self._at, self.target = None, self._last
            self._message = f"killed {self._last} (pid {pids[self._last]}) at update {step}"
            self._time = time.time()
            self._kill("driver", self._last, step, pids, actors)
        begun = self._faults.began is not None or step > self._first
        for failure in self._faults.due(time.monotonic()) if begun else ():
            name = f"worker-{self._random.randrange(self._workers)}" if failure.target == "worker" else failure.target
            if name == "raylet" and (raylets := [pid for one, pid in pids.items() if one.startswith("raylet-")]):
                pids = {**pids, name: self._random.choice(raylets)}
            if name in pids:
                self._kill("chaos", name, step, pids, actors)
            else:
                self._log.append("chaos", "missed", target=name)  # has not started yet

    def _kill(self, by: str, name: str, step: int, pids: Mapping[str, int], actors: Mapping[str, Any]) -> None:
        self._log.append(by, "kill", target=name, pid=pids[name], step=step)
        if os.environ.get("RAY_ADDRESS"):
            ray.kill(actors[name], no_restart=False)  # process may be on another machine
            return
        try:
            os.kill(pids[name], signal.SIGKILL)
        except ProcessLookupError:
            self._log.append(by, "missed", target=name, pid=pids[name])  # dead already, and being replaced

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
