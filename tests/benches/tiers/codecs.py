"""Bits a value against error of each codec, on all tensors of two policies.

The baseline is RTN: integers of b bits between the least and the largest of each 128 entries of a row, which are stored
as float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from mesh import make_mesh
from rl.parameter_server.codecs import EcsqCodec, HevcCodec, get_codec
from tests.benches.keeping import keeping
from tests.benches.tiers import drift
from tests.benches.tiers.policies import Arrays, policies, tensors
from tools.bench.harness.interleave import Say

GROUP = 128
ERRORS = (0.1, 0.03, 0.01, 1e-3)  # mean square over the variance
MAIN = 0.01


def measure(say: Say, *, quick: bool) -> dict[str, Any]:
    """Return the table, `hevc_to_rtn_bits` and `hevc_to_ecsq_bits` on keys of the demo, and what codecs change."""
    table: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    with jax.set_mesh(make_mesh()), keeping(changes, lambda: {"bits": table, "changes": changes}):
        found = policies(say, quick=quick)
        for name, policy in found.items():
            changes[name] = drift.measure(policy, say, name)
        for name, policy in found.items():
            for kind, arrays in tensors(policy, say).items():
                table[f"{name}: {kind}"] = _table(arrays, say, f"{name}: {kind}")
    main = table["demo: keys"][str(MAIN)]
    ratios = {f"hevc_to_{other}_bits": _ratio(main, other) for other in ("rtn", "ecsq")}
    same = {f"{one['codec']} {one['of']}": one["same_greedy"] for one in changes["demo"]}
    return {**ratios, "at_error": MAIN, "bits": table, "changes": changes, "same_tokens": same}


def _ratio(bits: dict[str, float], other: str) -> float | None:
    return round(bits["hevc"] / bits[other], 3) if "hevc" in bits else None


def _table(arrays: Arrays, say: Say, name: str) -> dict[str, dict[str, float]]:
    """Return bits a value by error: hevc at the coarsest QP that keeps it, the others at the error that hevc has.

    `bf16` and `int8` have an error of their own.
    """
    curve = [_rtn(arrays, bits) for bits in range(1, 9)]
    found = {}
    for error in ERRORS:
        row: dict[str, float] = {"error": error}
        if find_spec("av") is not None:
            row["hevc"], row["error"] = _coded(arrays, HevcCodec(error=error))
        row["ecsq"], _ = _coded(arrays, EcsqCodec(error=row["error"]))
        row["rtn"] = _between(curve, row["error"])
        found[str(error)] = row
    for codec in ("int8", "bf16"):
        bits, error = _coded(arrays, get_codec(codec))
        found[codec] = {"error": error, codec: bits}
    found = {at: {key: float(f"{value:.4g}") for key, value in row.items()} for at, row in found.items()}
    say(f"{name}: {found}")
    return found


def _coded(arrays: Arrays, codec: Any) -> tuple[float, float]:
    """Return bits a value of all arrays together, everything counted, and their error over their variance."""
    nbytes, size, error, variance = 0, 0, 0.0, 0.0
    for array in arrays:
        blob = codec.encode(array)
        back = codec.decode(blob, shape=array.shape, dtype=array.dtype)
        nbytes, size = nbytes + len(blob), size + array.size
        error += float(np.sum((back.astype(np.float64) - array) ** 2))
        variance += float(np.var(array, dtype=np.float64)) * array.size
    return 8 * nbytes / size, error / variance


def _rtn(arrays: Arrays, bits: int) -> tuple[float, float]:
    """Return bits a value, two float16 for each group of a row included, and the error of rounding to nearest."""
    size, groups, error, variance = 0, 0, 0.0, 0.0
    for array in arrays:
        for first in range(0, array.shape[1], GROUP):
            part = array[:, first : first + GROUP].astype(np.float64)
            least = part.min(axis=1, keepdims=True).astype(np.float16).astype(np.float64)
            step = ((part.max(axis=1, keepdims=True) - least) / (2**bits - 1)).astype(np.float16).astype(np.float64)
            codes = np.clip(np.rint((part - least) / np.maximum(step, 1e-12)), 0, 2**bits - 1)
            error += float(np.sum((codes * step + least - part) ** 2))
            size, groups = size + part.size, groups + len(part)
        variance += float(np.var(array, dtype=np.float64)) * array.size
    return bits + 32 * groups / size, error / variance


def _between(curve: Sequence[tuple[float, float]], error: float) -> float:
    """Return the bits of RTN at an error, between whole bits: linear in the logarithm of the error."""
    bits, errors = (np.array(one) for one in zip(*curve, strict=True))
    return float(np.interp(-np.log(error), -np.log(errors), bits))
