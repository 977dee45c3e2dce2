"""Interleaved measurement of several systems in one run, shared by all benchmarks with peers.

Each system runs warm in a process of its own. A round asks each for one step while the others wait
idle, so that whatever else happens on the machine falls on all alike.
"""

import contextlib
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.harness.processes import Command, our_command
from tools.bench.harness.protocol import STEP_FIELDS
from tools.bench.harness.sections import Interrupted
from tools.bench.harness.worker import StepWorker, WorkerError

OURS = "ours"
WARM_UP_ROUNDS = 3
READY_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 300.0
Say = Callable[[str], None]
Step = Mapping[str, float]
# Makes what workers of other projects need: their commands, and why some have none.
Others = Callable[[Say], tuple[Mapping[str, Command], Mapping[str, str]]]


@dataclass
class Measured:
    """Measurements of one system: its ready line and the fields of its measured steps, without the warm-up.

    `error` says why it stopped before the end, and then its steps do not count.
    """

    ready: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None

    def median(self, name: str) -> float:
        """Return the median of a step field."""
        return statistics.median(step[name] for step in self.steps)

    def median_ratio(self, above: str, below: str) -> float:
        """Return the median of one step field divided by another."""
        return statistics.median(step[above] / step[below] for step in self.steps)


def ratio_over_rounds(ours: Measured | None, theirs: Measured | None, figure: Callable[[Step], float]) -> float | None:
    """Return the median over rounds of a figure of our step divided by theirs of the same round; None without both."""
    if ours is None or theirs is None:
        return None
    return statistics.median(figure(our) / figure(their) for our, their in zip(ours.steps, theirs.steps, strict=True))


def measure(
    commands: Mapping[str, Command], steps: int, say: Say, fields: Sequence[str] = STEP_FIELDS
) -> dict[str, Measured]:
    """Run `steps` measured rounds of one step each, after the warm-up rounds.

    A worker that fails is left out of later rounds; the others continue.

    Args:
        commands: the systems by name, in the order of their turns.
        say: called with one line about progress.
        fields: figures that every step must report.
    """
    results = {name: Measured() for name in commands}
    logs = Path(tempfile.mkdtemp(prefix="axl-bench-"))
    with contextlib.ExitStack() as stack:
        workers: dict[str, StepWorker] = {}
        for name, command in commands.items():  # one by one, so that each first step has the machine to itself
            say(f"{name}: starting, first step")
            worker = stack.enter_context(StepWorker(name, command, logs / f"{name}.log", logs))
            try:
                results[name].ready = worker.wait_ready(READY_TIMEOUT_S)
                workers[name] = worker
            except WorkerError as error:
                _leave_out(results[name], worker, error, say)
        try:
            for index in range(WARM_UP_ROUNDS + steps):
                if workers:
                    _round(workers, results, fields, say, counts=index >= WARM_UP_ROUNDS)
                    say(f"round {index + 1} of {WARM_UP_ROUNDS + steps} ({WARM_UP_ROUNDS} warm-up)")
        except KeyboardInterrupt:
            shutil.rmtree(logs)
            raise _cut(results) from None
    if all(result.error is None for result in results.values()):
        shutil.rmtree(logs)  # kept if an error message refers to it
    return results


def _round(
    workers: dict[str, StepWorker], results: Mapping[str, Measured], fields: Sequence[str], say: Say, *, counts: bool
) -> None:
    """Make one step of each worker; one that fails is left out."""
    for name in list(workers):
        try:
            step = workers[name].step(STEP_TIMEOUT_S, fields)
        except WorkerError as error:
            _leave_out(results[name], workers.pop(name), error, say)
            continue
        if counts:
            results[name].steps.append(step)


def _cut(results: Mapping[str, Measured]) -> KeyboardInterrupt:
    """Return what an interruption leaves: the rounds that all systems have ended, if there are any."""
    there = [result for result in results.values() if result.error is None]
    rounds = min((len(result.steps) for result in there), default=0)
    for result in there:
        del result.steps[rounds:]
    return Interrupted(results) if rounds else KeyboardInterrupt()


def measure_with_peers(
    our_module: str, others: Others | None, steps: int, say: Say, fields: Sequence[str]
) -> dict[str, Measured]:
    """Measure our worker and those of `others` in turns; ours is under `OURS`.

    A peer whose environment cannot be made is in the result with its error.
    """
    commands, errors = others(say) if others else ({}, {})
    unmade = {name: Measured(error=error) for name, error in errors.items()}
    try:
        return measure({OURS: our_command(our_module), **commands}, steps, say, fields) | unmade
    except Interrupted as interrupted:
        raise Interrupted(interrupted.found | unmade) from None


def errors_of(results: Mapping[str, Measured]) -> dict[str, str]:
    """Return the systems that could not be measured, and why."""
    return {name: result.error for name, result in results.items() if result.error is not None}


def _leave_out(result: Measured, worker: StepWorker, error: WorkerError, say: Say) -> None:
    result.error = str(error)
    say(f"left out: {error}")
    worker.close(grace_s=0.1)
