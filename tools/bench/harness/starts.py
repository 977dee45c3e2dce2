"""Starts of workers that find their programs in a compilation cache on disk, as every start but a user's first does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench.harness.interleave import READY_TIMEOUT_S, Say
from tools.bench.harness.processes import Command
from tools.bench.harness.worker import StepWorker, WorkerError

type Systems = Mapping[str, Command]


def cached_starts(
    systems: Systems, folder: Path, times: int, say: Say
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Return ready lines of processes with a warm compilation cache on disk, `times` of each system, in turns.

    One earlier start fills the cache. The second result has the reason why a system did not reach its first step.
    """
    ready: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    errors: dict[str, str] = {}
    for index in range(times + 1):
        for name in [name for name in systems if name not in errors]:
            say(f"{name}: start {index} of {times}" if index else f"{name}: start that fills the cache")
            command, cwd = systems[name], folder / f"{name}-{index}"
            cwd.mkdir()
            log = folder / f"{name}-{index}.log"
            with StepWorker(name, _cached(command, folder / name), log, cwd) as worker:
                try:
                    line = worker.wait_ready(READY_TIMEOUT_S)
                except WorkerError as error:
                    say(f"left out: {error}")
                    errors[name] = str(error)
                    continue
            if index:
                ready[name].append(line)
    return ready, errors


def _cached(command: Command, cache: Path) -> Command:
    on = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "AXL_COMPILATION_CACHE": str(cache),
    }
    return Command(command.argv, {**command.environ, **on})
