"""`axl bench policies`: sections that can be measured one by one; an interruption leaves what is done."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mesh.programs.compilation import enable_compilation_cache
from tests.benches.policies.rl import commands, rl
from tests.benches.policies.service import fairness, first_token, slots
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.sections import run_sections

SECTIONS = {"rl": 150.0, "commands": 120.0, "slots": 60.0, "first_token": 40.0, "fairness": 40.0}
# A section returns its figures; the argument asks for tiny jobs, which show that all runs.
_MEASURES: Mapping[str, Callable[[bool], dict[str, Any]]] = {
    "rl": rl,
    "commands": commands,
    "slots": slots,
    "first_token": first_token,
    "fairness": fairness,
}


def run(sections: Sequence[str], say: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Return the figures of sections, and `missing`: those that Ctrl-C has left out."""
    enable_compilation_cache()
    where = machine()  # measured before our own load
    found, missing = run_sections({name: partial(_MEASURES[name], quick) for name in sections}, say)
    about = {"bench": "policies", "missing": missing, "machine": where, **circumstances()}
    return about | {figure: value for figures in found.values() for figure, value in figures.items()}
