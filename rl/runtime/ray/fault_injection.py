"""The killed worker that an experiment may ask for: once in a run, and how long until it is replaced."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import ray

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail
from rl.experiment import RLExperiment

Say = Callable[[str], None]


class FaultInjection:
    """`kill_worker_after` of the experiment: the last worker, with -9."""

    def __init__(self, cfg: RLExperiment.Config, run: RunDirectory):
        self.name = f"worker-{cfg.workers - 1}"
        self.target: str | None = None  # its name while it is killed and not yet replaced
        share = cfg.kill_worker_after if cfg.workers else None
        self._at = None if share is None else max(1, round(share * cfg.num_steps))
        if any(row["event"] == "kill" for row in JsonlTail(run.events_path).new_rows()):
            self._at = None
        self._words, self._time, self._started = "", 0.0, False

    def due(self, step: int) -> bool:
        return self._at is not None and step >= self._at

    def do(self, pid: int, actor: Any, step: int, log: EventLog) -> None:
        self._at, self.target = None, self.name
        self._words, self._time = f"killed {self.name} (pid {pid}) at update {step}", time.time()
        log.append("driver", "kill", target=self.name, pid=pid, step=step)
        if os.environ.get("RAY_ADDRESS"):
            ray.kill(actor, no_restart=False)  # its process may be on another machine
        else:
            os.kill(pid, signal.SIGKILL)

    def see(self, row: dict[str, Any], say: Say) -> None:
        """Replaced means: its successor has handed in rollouts."""
        if self.target is None or row["role"] != self.target or row["time"] < self._time:
            return
        self._started = self._started or row["event"] == "start"
        if self._started and row["event"] == "score":
            say(f"{self._words}; replaced after {row['time'] - self._time:.1f} s")
            self.target = None

    def end(self, say: Say) -> None:
        if self.target is not None:
            say(f"{self._words}; the updates were done before it was replaced")
            self.target = None
