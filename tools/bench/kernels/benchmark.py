"""`axl bench kernels`: values against float64, stages and the crossover of offloading, bit errors of LDPC codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.sections import run_sections

SECTIONS = {"values": 60.0, "sweep": 60.0, "bit_errors": 60.0}
_TARGET = 5e-3  # bit errors at which decoders are compared


def run(sections: Sequence[str], say: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Return the figures of sections, and `missing`: those that Ctrl-C has left out."""
    where = machine()
    measures: Mapping[str, Callable[[], dict[str, Any]]] = {
        "values": lambda: values(quick, say),
        "sweep": lambda: sweeps(quick, say),
        "bit_errors": lambda: bit_errors(2 if quick else 96),
    }
    found, missing = run_sections({name: measures[name] for name in sections}, say)
    about = {"bench": "kernels", "missing": missing, "machine": where, **circumstances()}
    return about | {figure: value for figures in found.values() for figure, value in figures.items()}


def values(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the largest errors of all implementations; of LDPC the share of decisions, which is 0."""
    from tools.bench.kernels.registry import errors
    from tools.bench.kernels.workloads import WORKLOADS

    found: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        say(f"values of {name}")
        found[name] = errors(workload, workload.sizes[0] if quick else workload.sizes[1])
    return {"errors_of": found}


def sweeps(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the stages by workload, size and implementation, crossovers, and the CPU time of numpy over XLA's."""
    from tools.bench.kernels.registry import sweep
    from tools.bench.kernels.workloads import WORKLOADS

    found: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        say(f"sweep of {name}")
        found[name] = sweep(workload, workload.sizes[:1] if quick else workload.sizes, 1 if quick else 7)
    rows = found["ldpc"]["stages"]
    faster = {size: row["numpy"]["cpu"] / row["xla"]["cpu"] for size, row in rows.items()}
    return {"sweep": found, "ldpc_xla_vs_numpy": faster}


def bit_errors(words: int) -> dict[str, Any]:
    """Return bit errors by Eb/N0 in decibels, and how many decibels min-sum in fixed point is from the sum-product."""
    from tools.bench.kernels.ldpc.decode import decode_xla, sum_product
    from tools.bench.kernels.workloads import CODE, RULE, noisy_words

    curve: dict[str, dict[str, float]] = {}
    for decibels in (1.25, 1.5, 1.75):
        sent, ratios = noisy_words(words, decibels, seed=1)
        decided = {
            "min_sum": np.asarray(decode_xla(CODE, RULE, RULE.quantise(ratios))) < 0,
            "sum_product": sum_product(CODE, ratios, RULE.passes) < 0,
            "undecoded": ratios < 0,
        }
        curve[str(decibels)] = {name: float((bits != sent).mean()) for name, bits in decided.items()}
    at = {name: _decibels(curve, name) for name in ("min_sum", "sum_product")}
    return {"bit_errors": curve, "ldpc_gap_db": at["min_sum"] - at["sum_product"], "ldpc_words": words}


def _decibels(curve: Mapping[str, Mapping[str, float]], name: str) -> float:
    """Return the Eb/N0 at the target, between the measured ones in the logarithm of errors."""
    levels = np.log([max(row[name], 1e-7) for row in curve.values()])
    return float(np.interp(-np.log(_TARGET), -levels, [float(level) for level in curve]))
