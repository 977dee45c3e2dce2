"""`axl bench episodes`: sections that can be measured one by one; an interruption leaves what is done."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mesh.programs.compilation import enable_compilation_cache
from tests.benches.episodes.agents import agents
from tests.benches.episodes.graph import graph
from tests.benches.episodes.overlap import overlap
from tests.benches.episodes.partial import partial_execution
from tests.benches.episodes.plans import plans
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.sections import run_sections

SECTIONS = {"tools": 60.0, "partial": 90.0, "graph": 90.0, "plans": 1500.0, "agents": 300.0}
# A section returns its figures; the argument asks for tiny jobs, which show that all runs.
_MEASURES: Mapping[str, Callable[[bool], dict[str, Any]]] = {
    "tools": overlap,
    "partial": partial_execution,
    "graph": graph,
    "plans": plans,
    "agents": agents,
}


def run(sections: Sequence[str], say: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Return the figures by section, and `missing`: sections that Ctrl-C has left out."""
    enable_compilation_cache()
    where = machine()  # measured before our own load
    found, missing = run_sections({name: partial(_MEASURES[name], quick) for name in sections}, say)
    return {"bench": "episodes", "missing": missing, "machine": where, **circumstances(), **found}
