"""The form of a workload of kernels: inputs by size, a reference in float64, and implementations that take the same.

The method is that of DecodeX (one harness, the same vectors for all, stages apart): a call is preparation on the host,
copies to the device, the launch, computing, and the copy back, each with a time of its own.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mesh.errors import UserError

Arrays = tuple[np.ndarray[Any, Any], ...]
STAGES = ("prepare", "copy_in", "launch", "compute", "copy_out")
HOST, DEVICE, SIMULATED = "host", "device", "simulated"  # platforms: numpy, XLA's default device, a kernel on a CPU


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A way to compute a workload.

    Attributes:
        platform: `HOST` for numpy arrays, `DEVICE` for jitted arrays, `SIMULATED` for values alone.
        run: computes one array from the prepared inputs.
    """

    platform: str
    run: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class KernelWorkload:
    """A computation with several implementations.

    Attributes:
        make: returns inputs of a size (a batch), the same for all.
        prepare: what the host does with them before any implementation.
        reference: the result in float64 from prepared inputs.
        bound: largest error, of the largest value.
        sizes: batches of the sweep, ascending.
        by: implementations by name; the one on the host is what offloading is compared with.
        key: what of a result is compared with the reference.
    """

    make: Callable[[int], Arrays]
    prepare: Callable[[Arrays], Arrays]
    reference: Callable[..., Any]
    bound: float
    sizes: Sequence[int]
    by: Mapping[str, Implementation]
    key: Callable[[Any], Any] = np.asarray


def float32(inputs: Arrays) -> Arrays:
    """Return floats as float32, and whole numbers as they are."""
    return tuple(one.astype(np.float32) if one.dtype.kind == "f" else one for one in inputs)


def errors(workload: KernelWorkload, size: int) -> dict[str, float]:
    """Return the largest error of each implementation, of the largest value of the reference.

    Raises:
        UserError: one is above the bound; it has no times.
    """
    inputs = workload.prepare(workload.make(size))
    right = np.asarray(workload.key(workload.reference(*inputs)), np.float64)
    found: dict[str, float] = {}
    for name, one in workload.by.items():
        got = np.asarray(workload.key(np.asarray(one.run(*inputs))), np.float64)
        found[name] = float(np.abs(got - right).max() / max(np.abs(right).max(), 1e-30))
        if not found[name] <= workload.bound:
            raise UserError(f"{name} is {found[name]:.2g} from float64; expected at most {workload.bound:.2g}")
    return found


def sweep(workload: KernelWorkload, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Return median seconds of the stages by size and implementation, and from which size offloading pays.

    `crossover` counts all stages of the device, `crossover_resident` none of its copies: inputs that live there.
    """
    names = [name for name, one in workload.by.items() if one.platform != SIMULATED]
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for size in sizes:
        inputs = workload.make(size)
        calls = {name: _timer(workload, workload.by[name], inputs) for name in names}
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, call in calls.items():  # turns, so that other load falls on all alike
                taken[name].append(call())
        rows[str(size)] = {name: _medians(each) for name, each in taken.items()}
    host = next(name for name in names if workload.by[name].platform == HOST)
    crossover: dict[str, Any] = {}
    for name in names:
        if name != host:
            pays = [int(size) for size, row in rows.items() if row[name]["total"] < row[host]["total"]]
            lives = [int(size) for size, row in rows.items() if row[name]["resident"] < row[host]["resident"]]
            crossover[name] = {"crossover": min(pays, default=None), "crossover_resident": min(lives, default=None)}
    return {"stages": rows, **crossover}


def _medians(taken: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found = {stage: statistics.median(one[stage] for one in taken) for stage in (*STAGES, "cpu")}
    total = sum(found[stage] for stage in STAGES)
    resident = found["launch"] + found["compute"]
    return found | {"total": total, "resident": resident}


def _timer(workload: KernelWorkload, one: Implementation, inputs: Arrays) -> Callable[[], dict[str, float]]:
    """Return a call of a compiled implementation that gives the seconds of its stages."""
    device = one.platform == DEVICE
    run = jax.jit(one.run) if device else one.run

    def call() -> dict[str, float]:
        marks, used = [time.perf_counter()], time.process_time()
        given: Any = workload.prepare(inputs)
        marks.append(time.perf_counter())
        if device:
            given = jax.block_until_ready(jax.device_put(given))
        marks.append(time.perf_counter())
        found = run(*given) if device else None
        marks.append(time.perf_counter())
        found = jax.block_until_ready(found) if device else run(*given)
        marks.append(time.perf_counter())
        np.asarray(found)
        marks.append(time.perf_counter())
        spent = [after - before for before, after in zip(marks, marks[1:], strict=False)]
        return dict(zip(STAGES, spent, strict=True)) | {"cpu": time.process_time() - used}

    call()
    return call
