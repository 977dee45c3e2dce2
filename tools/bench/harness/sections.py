"""Sections of a benchmark: modules with `measure(quick=...) -> dict`, each measured alone in a process of its own.

    python -m tools.bench.harness.sections tools.bench.weights.sections.moving [--quick] [--one-core]

prints the result of one as JSON. Its keys become keys of the benchmark's result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from mesh.errors import UserError, did_you_mean
from tools.bench.harness.circumstances import machine
from tools.bench.harness.interleave import Say
from tools.bench.harness.processes import MeasurementFailed, our_command, run_command
from tools.bench.harness.protocol import use_one_core


def find_sections(benchmark: str, names: Iterable[str], known: Iterable[str], default: Iterable[str]) -> list[str]:
    """Return the sections of these names, or the default ones without names, in the order in which they run.

    Raises:
        UserError: a name is not that of a section.
    """
    known, asked = list(known), list(names)
    for name in asked:
        if name not in known:
            raise UserError(f"benchmark {benchmark} has no section {name!r}{did_you_mean(name, known)}")
    chosen = set(asked or default)
    return [name for name in known if name in chosen]


def run_sections(
    package: str, sections: Mapping[str, str], say: Say, *flags: str
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Measure one section after the other.

    Args:
        package: package of the sections' modules.
        sections: what each measures, by name.
        say: called with one line about progress.
        flags: options of the process, such as `--quick`.

    Returns:
        The results by section, and for each section that failed the reason.
    """
    parts, errors = {}, {}
    for name, what in sections.items():
        say(f"{name}: {what}")
        command = our_command("tools.bench.harness.sections", f"{package}.{name}", *flags)
        try:
            parts[name] = run_command(command, JAX_ENABLE_COMPILATION_CACHE="true")
        except MeasurementFailed as error:
            errors[name] = f"{name}: {error}"
            say(f"left out: {errors[name]}")
    return parts, errors


def main(module: str, *flags: str) -> None:
    """Measure one section and print its result."""
    if "--one-core" in flags:
        use_one_core()  # jax counts the cores later

    from mesh import enable_compilation_cache

    enable_compilation_cache()  # no section measures a cold start
    before = machine()["load"]
    result = import_module(module).measure(quick="--quick" in flags)
    own = result.get(module.rpartition(".")[2])
    if isinstance(own, dict):
        own["load"] = [before, machine()["load"]]
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
