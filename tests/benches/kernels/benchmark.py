"""`axl bench kernels`: values against float64, stages and the crossover of offloading, bit errors of LDPC codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.benches.keeping import keeping
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.sections import run_sections

SECTIONS = {"values": 60.0, "sweep": 60.0, "bit_errors": 60.0}


def run(sections: Sequence[str], say: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Return the figures of sections, and `missing`: those that Ctrl-C has left out."""
    where = machine()
    measures: Mapping[str, Callable[[], dict[str, Any]]] = {
        "values": lambda: values(quick, say),
        "sweep": lambda: sweeps(quick, say),
        "bit_errors": lambda: _bit_errors(2 if quick else 96),
    }
    found, missing = run_sections({name: measures[name] for name in sections}, say)
    about = {"bench": "kernels", "missing": missing, "machine": where, **circumstances()}
    return about | {figure: value for figures in found.values() for figure, value in figures.items()}


def values(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the largest errors of all implementations; of LDPC the share of decisions, which is 0."""
    from tests.benches.kernels.registry import errors
    from tests.benches.kernels.workloads import WORKLOADS

    found: dict[str, Any] = {}
    with keeping(found, lambda: {"errors_of": found}):
        for name, workload in WORKLOADS.items():
            say(f"values of {name}")
            found[name] = errors(workload, workload.sizes[0] if quick else workload.sizes[1])
    return {"errors_of": found}


def sweeps(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the stages by workload, size and implementation, crossovers, and the CPU time of numpy over XLA's."""
    from tests.benches.kernels.registry import sweep
    from tests.benches.kernels.workloads import WORKLOADS

    found: dict[str, Any] = {}
    with keeping(found, lambda: {"sweep": found}):
        for name, workload in WORKLOADS.items():
            say(f"sweep of {name}")
            found[name] = sweep(workload, workload.sizes[:1] if quick else workload.sizes, 1 if quick else 7)
    rows = found["ldpc"]["stages"]
    faster = {size: row["numpy"]["cpu"] / row["xla"]["cpu"] for size, row in rows.items()}
    return {"sweep": found, "ldpc_xla_vs_numpy": faster}


def _bit_errors(words: int) -> dict[str, Any]:
    from tests.benches.kernels.ldpc.workload import bit_errors

    return bit_errors(words)
