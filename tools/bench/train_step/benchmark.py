"""`axl bench train_step`: cost of our trainer beside a plain-JAX script and MaxText on one small decoder.

Steps are interleaved in one run; the host's part of a step and the start of the program are measured separately.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.environments import EnvironmentFailed, Peer
from tools.bench.harness.interleave import (
    OURS,
    READY_TIMEOUT_S,
    Command,
    Measured,
    Say,
    measure,
    median_over_rounds,
    our_command,
    peer_command,
    worker_environ,
)
from tools.bench.harness.protocol import TRAIN_FIELDS
from tools.bench.harness.worker import StepWorker, WorkerError
from tools.bench.train_step.job import DTYPES, QUICK, TrainJob

BENCHMARK = "train_step"
EXPERIMENTS = "tools.bench.train_step.ours"
PLAIN, FLAT = "plain_jax", "plain_jax_flat"
LAYERS = (8, 64)  # at which dispatch is measured
STARTS = 3  # with a warm cache; one before fills it
PACKAGES = ("axlearn-like", "jax", "jaxlib", "flax", "optax", "grain", "numpy")
_DISPATCH_TIMEOUT_S = 600.0

type Systems = Mapping[str, Command]


def run(peers: Sequence[Peer], rounds: int, say: Say, *, quick: bool = False) -> dict[str, Any]:
    """Return everything that `--json` prints; failed measurements are listed under `errors`."""
    where = machine()  # before we load it ourselves
    systems, errors = commands(peers, say, quick=quick)
    # A step with float32 and one with bfloat16 of each system make one round.
    steps = measure({f"{name} {dtype}": with_dtype(systems[name], dtype) for dtype in DTYPES for name in systems},
                    rounds, say, TRAIN_FIELDS)  # fmt: skip
    errors |= {name: result.error for name, result in steps.items() if result.error is not None}
    started = {name: command for name, command in systems.items() if name != FLAT}
    with tempfile.TemporaryDirectory(prefix="axl-bench-") as folder:
        starts, unstarted = cold_starts(started, Path(folder), 1 if quick else STARTS, say)
    dispatch = {}
    for layers in LAYERS:
        try:
            dispatch[str(layers)] = dispatch_us(layers, say, quick=quick)
        except subprocess.SubprocessError as error:
            errors[f"dispatch at {layers} layers"] = str(error)
    errors |= {f"start of {name}": why for name, why in unstarted.items()}
    result = summarise(steps, starts, dispatch, rounds)
    return result | {"quick": quick, "errors": errors, "machine": where, **circumstances(PACKAGES)}


def commands(peers: Sequence[Peer], say: Say, *, quick: bool) -> tuple[dict[str, Command], dict[str, str]]:
    """Return each system's command, in the order of turns, and why some peers have none; `{}` is for the dtype."""
    more = ["--quick"] if quick else []
    cli, plain = our_command("tools.cli"), our_command("tools.bench.train_step.plain")
    found = {
        OURS: Command((*cli.argv, "train", "--quiet", EXPERIMENTS + (":{}_quick" if quick else ":{}")), cli.environ),
        PLAIN: Command((*plain.argv, *more, "--dtype", "{}"), plain.environ),
        FLAT: Command((*plain.argv, "--flat", *more, "--dtype", "{}"), plain.environ),
    }
    errors = {}
    for peer in peers:
        try:
            command = peer_command(peer, BENCHMARK, say)
            found[peer.name] = Command((*command.argv, *more, "--dtype", "{}"), command.environ)
        except EnvironmentFailed as error:
            say(f"left out: {error}")
            errors[peer.name] = str(error)
    return found, errors


def with_dtype(command: Command, dtype: str) -> Command:
    """Return the command of the same system with activations of this dtype."""
    *argv, last = command.argv
    return Command((*argv, last.format(dtype)), command.environ)


def cold_starts(
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
            command, cwd = with_dtype(systems[name], DTYPES[0]), folder / f"{name}-{index}"
            cwd.mkdir()
            log = folder / f"{name}-{index}.log"
            with StepWorker(name, command.argv, _cached(command, folder / name), log, cwd) as worker:
                try:
                    line = worker.wait_ready(READY_TIMEOUT_S)
                except WorkerError as error:
                    say(f"left out: {error}")
                    errors[name] = str(error)
                    continue
            if index:
                ready[name].append(line)
    return ready, errors


def _cached(command: Command, cache: Path) -> dict[str, str]:
    on = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "AXL_COMPILATION_CACHE": str(cache),
    }
    return {**command.environ, **on}


def dispatch_us(layers: int, say: Say, *, quick: bool) -> dict[str, float]:
    """Return the result of `tools.bench.train_step.dispatch.measure`, run in a process of its own.

    Raises:
        subprocess.SubprocessError: it failed, or took too long.
    """
    say(f"dispatch at {layers} layers")
    command = our_command("tools.bench.train_step.dispatch")
    argv = [*command.argv, str(layers), *(["--calls", "3"] if quick else [])]
    done = subprocess.run(
        argv,
        env=worker_environ(**command.environ, AXL_COMPILATION_CACHE="off"),
        capture_output=True,
        text=True,
        timeout=_DISPATCH_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        reason = "\n".join(done.stderr.splitlines()[-8:])
        raise subprocess.SubprocessError(f"ended with status {done.returncode}\n{reason}")
    return json.loads(done.stdout.splitlines()[-1])


def summarise(
    steps: Mapping[str, Measured],
    starts: Mapping[str, Sequence[Mapping[str, Any]]],
    dispatch: Mapping[str, Mapping[str, float]],
    rounds: int,
) -> dict[str, Any]:
    """Return the figures. Those at the top level are of float32; those of bfloat16 are under that name.

    Args:
        steps: by "system dtype".
        starts: ready lines, by system.
        dispatch: by number of layers.
        rounds: measured.
    """
    done = {name: result for name, result in steps.items() if result.error is None}
    first, *others = DTYPES
    cold = {name: statistics.median(line["start_cpu_s"] for line in lines) for name, lines in starts.items() if lines}
    ours = sorted(starts.get(OURS, ()), key=lambda line: line["start_cpu_s"])
    return {
        "bench": BENCHMARK,
        **_of_dtype(done, first),
        **{dtype: _of_dtype(done, dtype) for dtype in others},
        "dispatch_us": {layers: figures["lowest"] for layers, figures in dispatch.items()},
        "dispatch": dict(dispatch),
        "cold_start_cpu_s": cold.get(OURS),
        "cold_start_parts": ours[len(ours) // 2]["phases"] if ours else None,  # of the median start
        "cold_start_cpu_s_of": cold,
        "uncached_start_cpu_s": {name: result.ready["start_cpu_s"] for name, result in done.items()},
        "steps": rounds,
        "parameters": {name: result.ready["parameters"] for name, result in done.items()},
        "system_versions": {name.partition(" ")[0]: result.ready["version"] for name, result in done.items()},
        "loss_last": {name: result.steps[-1]["loss"] for name, result in done.items()},
        "cpu_s_by_round": {name: [round(step["cpu_s"], 4) for step in r.steps] for name, r in done.items()},
        "idle_cpu_s": {name: result.median("idle_cpu_s") for name, result in done.items()},
    }


def _of_dtype(done: Mapping[str, Measured], dtype: str) -> dict[str, Any]:
    """Return medians of each system, and of our CPU seconds divided by theirs in the same round."""
    of = {name.partition(" ")[0]: result for name, result in done.items() if name.endswith(f" {dtype}")}
    figures: dict[str, Any] = {}
    for name in (OURS, PLAIN, FLAT, *(name for name in of if name not in (OURS, PLAIN, FLAT))):
        figures[f"{name}_cpu_s"] = of[name].median("cpu_s") if name in of else None
        figures[f"{name}_wall_s"] = of[name].median("wall_s") if name in of else None
        if name != OURS:
            both = OURS in of and name in of
            ratio = median_over_rounds(of[OURS], of[name], _by_cpu) if both else None
            figures["ratio" if name == PLAIN else f"ratio_to_{name}"] = ratio
    return figures


def _by_cpu(our: Mapping[str, float], their: Mapping[str, float]) -> float:
    return our["cpu_s"] / their["cpu_s"]


def succeeded(result: Mapping[str, Any], peers: Sequence[Peer]) -> bool:
    """Return whether everything that was requested has been measured."""
    wanted = [result["ratio"], result["cold_start_cpu_s"], *(result.get(f"ratio_to_{peer.name}") for peer in peers)]
    return None not in wanted and set(result["dispatch_us"]) == {str(layers) for layers in LAYERS}


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the console table: system, CPU s, wall s and ours / theirs by dtype, and CPU s to start."""
    systems = [key.removesuffix("_wall_s") for key in result if key.endswith("_wall_s")]
    table = []
    for name in systems:
        row = [name]
        for part in (result, *(result[dtype] for dtype in DTYPES[1:])):
            ratio = part.get("ratio" if name == PLAIN else f"ratio_to_{name}")
            row += [_text(part.get(f"{name}_cpu_s")), _text(part.get(f"{name}_wall_s")), _text(ratio)]
        table.append([*row, _text(result["cold_start_cpu_s_of"].get(name), 1)])
    return table


def _text(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def describe_job(*, quick: bool = False) -> str:
    """Describe the job in one line."""
    job = QUICK if quick else TrainJob()
    return (
        f"{job.layers} layers x {job.dim}, {job.batch} rows of {job.length} tokens, "
        f"{job.parameters:,} parameters, AdamW, CPU"
    )
