"""Model FLOPs of a training step and peak FLOP/s of devices, of which MFU is the quotient."""

from collections.abc import Sequence
from typing import Any

from axlearn_like.config import ConfigBase
from mesh import UserError, device_name

# bfloat16 FLOP/s of GPUs, dense, and bytes/s of their memory, by NVIDIA's data sheets (of the A100 that of 80 GB); the
# first name that is part of the device's counts.
GPU_PEAKS = {
    "h100-pcie": (756e12, 2.0e12),
    "h100": (989e12, 3.35e12),
    "h200": (989e12, 4.8e12),
    "b200": (2250e12, 8.0e12),
    "a100": (312e12, 2.039e12),
}


def step_flops(model: ConfigBase, rows: int, length: int) -> float | None:
    """Return the model FLOPs, forward and backward, of a step on `rows` rows of `length` tokens; None if unknown.

    Causal: half of the pairs of a query and a key. Recomputation does not count; rows count as whole, although tokens
    do not attend across the borders of packed examples.
    """
    from axlearn_like.operations.flops import model_flops, rows_workload

    try:
        return model_flops(model, rows_workload(rows, length), backward=True)
    except UserError:
        return None


def row_flops(model: ConfigBase, prefix: int, samples: int, length: int) -> float | None:
    """Return the model FLOPs of a policy update, per row: a shared prompt and its completions; None if unknown."""
    from axlearn_like.operations.flops import model_flops, shared_prompt_workload

    try:
        return model_flops(model, shared_prompt_workload(1, prefix, samples, length), backward=True)
    except UserError:
        return None


def peak_flops(devices: Sequence[Any]) -> float | None:
    """Return the bfloat16 FLOP/s of one device; None where it is not known, as for CPUs."""
    return _peaks(devices)[0]


def peak_bandwidth(devices: Sequence[Any]) -> float | None:
    """Return the bytes/s of one device's memory; None where it is not known, as for CPUs."""
    return _peaks(devices)[1]


def _peaks(devices: Sequence[Any]) -> tuple[float, float] | tuple[None, None]:
    from mesh.generations import generation_of

    if (generation := generation_of(devices[0])) is not None:
        return generation.per_device(generation.flops), generation.per_device(generation.hbm_bandwidth)
    kind = device_name(devices[:1])
    return next((peaks for name, peaks in GPU_PEAKS.items() if kind.startswith("gpu-") and name in kind), (None, None))
