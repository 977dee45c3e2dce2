"""The line protocol between a benchmark worker and the runner: one step per line.

A worker is a process that holds one system, warm. It prints `{"ready": true, ...}` after its first
step; then, for each line `step` on its standard input, it runs exactly one step and prints the
figures of that step; `quit` or a closed input ends it. Between lines it waits without using the
processor, so several systems can take turns step by step on one machine.

The benchmark defines a step: one optimiser step of RL (`STEP_FIELDS`) or of supervised training (`TRAIN_FIELDS`),
or one generation of all rollouts and nothing else (`GENERATION_FIELDS`).

Standard library only, and Python 3.11: peers import this file inside environments of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

GENERATION_FIELDS = ("cpu_s", "wall_s", "idle_cpu_s", "new_tokens")
TRAIN_FIELDS = ("cpu_s", "wall_s", "idle_cpu_s", "loss")
STEP_FIELDS = (*GENERATION_FIELDS, "gen_cpu_s", "gen_wall_s", "reward")


class Clock(NamedTuple):
    """A reading of both clocks, in seconds."""

    cpu: float
    wall: float

    def since(self, start: Clock) -> Clock:
        """Return the seconds between `start` and this reading."""
        return Clock(self.cpu - start.cpu, self.wall - start.wall)


def now() -> Clock:
    """Read the clocks; CPU seconds include all threads of this process and its finished children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = time.process_time() + children.ru_utime + children.ru_stime
    return Clock(cpu, time.perf_counter())


def use_one_core() -> None:
    """Restrict this process to one core; call it before anything counts the cores to start threads.

    A figure per CPU second loses where threads synchronise after each small operation: on two busy cores torch gave 1.5
    times and tunix 1.05 times as many tokens with one. Without effect where the system cannot do it.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


class StepServer:
    """The worker's end of the protocol. It works with any training loop that calls `step_done` after each step.

    Takes over the process's standard output and redirects whatever libraries print there to
    standard error, so nothing but the protocol reaches the runner.

    Args:
        version: name and version of what is measured.
        parameters: size of the model, for the runner to check that all have the same; the attribute may be set later,
            before the first step ends.
    """

    def __init__(self, version: str, parameters: int):
        sys.stdout.flush()
        self._replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._version = version
        self.parameters = parameters
        self._ready = False
        self._idle_cpu = 0.0
        self._reset()

    def begin(self) -> None:
        """Start the clock of the first step; call it when everything is built, before anything compiles."""
        self._reset()

    def serve(self, step: Callable[[int], object]) -> None:
        """Run `step(0)`, `step(1)`, ..., one for each request; each is finished when the call returns."""
        self.begin()
        index = 0
        step(index)
        while self.step_done():
            index += 1
            step(index)

    @contextlib.contextmanager
    def generation(self) -> Iterator[None]:
        """Count the time inside the `with` block as generation; the caller waits for the tokens inside it."""
        start = now()
        yield
        spent = now().since(start)
        before = self._gen or Clock(0.0, 0.0)
        self._gen = Clock(before.cpu + spent.cpu, before.wall + spent.wall)

    def record(self, new_tokens: int, reward: float | None = None) -> None:
        """Record the sampled tokens of the current step and, if there is one, the mean reward."""
        self._new_tokens += new_tokens
        self._reward = reward

    def note(self, **figures: object) -> None:
        """Add figures of any name to the report of the current step."""
        self._notes |= figures

    def step_done(self) -> bool:
        """End a step, whose work must be finished: report it and wait for the next request.

        Generation and reward are reported if they were recorded since the previous step.

        Returns:
            True to run one more step, False to stop.
        """
        spent = now().since(self._start)
        if self._ready:
            values = (*spent, self._idle_cpu, self._new_tokens)
            reply: dict[str, object] = dict(zip(GENERATION_FIELDS, values, strict=True)) | self._notes
            if self._gen is not None:
                reply |= {"gen_cpu_s": self._gen.cpu, "gen_wall_s": self._gen.wall}
            if self._reward is not None:
                reply["reward"] = self._reward
            self._reply(reply)
        else:
            self._ready = True
            first = {"first_step_s": spent.wall, "first_step_cpu_s": spent.cpu, "start_cpu_s": now().cpu}
            about = {"version": self._version, "parameters": self.parameters}
            reward = {} if self._reward is None else {"reward": self._reward}
            self._reply({"ready": True, **first, **about, **reward, **self._notes})
        waiting = now()
        line = sys.stdin.readline()
        self._idle_cpu = now().since(waiting).cpu
        self._reset()
        if line.strip() not in ("step", "quit", ""):
            raise ValueError(f"unknown request {line.strip()!r}; expected 'step' or 'quit'")
        return line.strip() == "step"

    def _reset(self) -> None:
        self._gen: Clock | None = None
        self._new_tokens = 0
        self._reward: float | None = None
        self._notes: dict[str, object] = {}
        self._start = now()

    def _reply(self, message: dict[str, object]) -> None:
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()
