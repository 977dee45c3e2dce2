"""`axl bench weights`: cost of moving weights from a trainer to workers, through the parameter server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.bench.harness.circumstances import PACKAGES, circumstances, machine
from tools.bench.harness.interleave import Say
from tools.bench.harness.sections import run_sections
from tools.bench.weights.sections import SECTIONS

BENCHMARK = "weights"


def run(say: Say, *, sections: Sequence[str] = tuple(SECTIONS), quick: bool = False) -> dict[str, Any]:
    """Return everything that `--json` prints.

    Args:
        say: called with one line about progress.
        sections: by name.
        quick: tiny jobs, as a smoke test.
    """
    where = machine()  # measured before our own load
    chosen = {name: SECTIONS[name] for name in sections}
    parts, errors = run_sections("tools.bench.weights.sections", chosen, say, *(["--quick"] if quick else []))
    result: dict[str, Any] = {"bench": BENCHMARK, "sections": list(sections), "quick": quick}
    for part in parts.values():
        result |= part
    return result | {"errors": errors, "machine": where, **circumstances((*PACKAGES, "xxhash", "zstandard"))}
