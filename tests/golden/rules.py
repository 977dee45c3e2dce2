"""Figures of the compiler for experiments' mesh rules: full size, on the smallest slice of a kind that has a rule.

    python -m tests.golden.rules                     # those that are not stored yet; a minute and more for each
    python -m tests.golden.rules llama2_7b.v6e ...   # these
    python -m tests.golden.rules --all

The figures are stored (tests/experiments/compiled/rules.json), and the table of docs/reference/mesh-rules.md is written
from them. Tests compile again with --full, and compare. Needs libtpu (the extra `aot`).
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import click

from axlearn_like.config import ConfigBase, ConfigError, with_mesh_rules
from experiments.registry import entries, get
from mesh.errors import UserError, did_you_mean
from mesh.generations import GENERATIONS
from mesh.topology import Topology, parse_topology, prepare_compiler
from rl.fleet.devices import parse_devices
from tests.golden.compiles import DIRECTORY, versions

RECORD = DIRECTORY / "rules.json"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "mesh-rules.md"
COMMAND = "python -m tests.golden.rules"
_MARKS = ("<!-- rules: begin -->", "<!-- rules: end -->")
_GIB = 1 << 30

Figures = dict[str, Any]


class Case(NamedTuple):
    """The train step of an experiment on the smallest slice of a generation that has a rule."""

    experiment: str
    topology: Topology

    @property
    def name(self) -> str:
        """Experiment and generation."""
        return f"{self.experiment}.{self.topology.generation.name}"


def cases() -> list[Case]:
    """Return all cases, by experiment and generation."""
    found: list[Case] = []
    for name in entries():
        cfg = get(name)
        if getattr(cfg, "mesh_rules", ()):
            smallest = (smallest_slice(cfg, generation) for generation in GENERATIONS)
            found += [Case(name, topology) for topology in smallest if topology is not None]
    return found


def smallest_slice(cfg: ConfigBase[Any], generation: str) -> Topology | None:
    """Return the smallest slice of a generation for which an experiment has a rule; None: there is no rule."""
    for topology in slices(generation):
        try:
            with_mesh_rules(cfg, device_name_of(topology))
        except ConfigError:
            continue
        return topology
    return None


def slices(generation: str) -> list[Topology]:
    """Return the slices of a generation, the smallest first: of as many chips as are a power of two."""
    counted = GENERATIONS[generation].counted
    found: list[Topology] = []
    for chips in (1 << n for n in range(11)):
        try:
            found.append(parse_topology(f"{generation}-{chips * counted}"))
        except UserError:
            continue
    return found


def device_name_of(topology: Topology) -> str:
    """Return the name of a slice's devices, as mesh rules know them, without the compiler."""
    return parse_devices(topology.name, "topology").name


def compiled_figures(case: Case) -> Figures:
    """Return what the compiler says; JSON-able."""
    from tools.aot.run import compile_experiment, load_for, tuning_of

    cfg = load_for(case.experiment, (), case.topology)
    report, tuning = compile_experiment(cfg, "train", case.topology).report, tuning_of(cfg)
    hbm = report["hbm"] or {}
    return {
        "topology": case.topology.name,
        "devices": case.topology.devices,
        "mesh": report["mesh"],
        "remat": tuning.model.remat,
        "microbatches": tuning.microbatches,
        "rows": report["rows"],
        "length": report["length"],
        "fits": report["fits"],
        "peak": hbm.get("peak", report["oom"] and report["oom"]["needed"]),
        "available": hbm.get("available", report["oom"] and report["oom"]["available"]),
        "estimated_step_s": report["estimated_step_s"] and round(report["estimated_step_s"], 3),
        "compile_cpu_s": round(report["compile_cpu_s"]),
        "versions": versions(),
    }


def stored() -> dict[str, Figures]:
    """Return the stored figures by case."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def store(figures: dict[str, Figures]) -> None:
    """Write figures, those of cases that are gone left out, and the page's table."""
    known = [case.name for case in cases()]
    kept = {name: figures[name] for name in known if name in figures}
    RECORD.write_text("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in kept.items()) + "\n}\n")
    begin, end = _MARKS
    page = PAGE.read_text()
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{begin}\n{table(kept)}\n{end}", page))


def table(figures: dict[str, Figures]) -> str:
    """Return the page's table: experiments by generations."""
    by_experiment: dict[str, dict[str, Case]] = {}
    for case in cases():
        by_experiment.setdefault(case.experiment, {})[case.topology.generation.name] = case
    lines = [f"| | {' | '.join(GENERATIONS)} |", "|---" * (len(GENERATIONS) + 1) + "|"]
    for experiment, of in by_experiment.items():
        cells = [_cell(of.get(name), figures) for name in GENERATIONS]
        lines.append(f"| `{experiment}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(case: Case | None, figures: dict[str, Figures]) -> str:
    if case is None:
        return "-"
    found, shape = figures.get(case.name), case.topology.name.partition(":")[2]
    if found is None:
        return f"{shape}, not compiled"
    memory = f"{found['peak'] / _GIB:.1f} of {found['available'] / _GIB:.1f} GiB"
    return f"{shape}: {memory}, {found['estimated_step_s']:.3g} s"


def chosen(names: tuple[str, ...], everything: bool) -> list[Case]:
    """Return the cases of these names, else those that are not stored, or all.

    Raises:
        UserError: there is no such case.
    """
    known = {case.name: case for case in cases()}
    for name in names:
        if name not in known:
            raise UserError(f"no case {name!r}{did_you_mean(name, known)}")
    have = stored()
    return [case for name, case in known.items() if (name in names if names else everything or name not in have)]


@click.command(
    help=f"Compile experiments on the smallest slices of their mesh rules; write {RECORD.name} and the docs."
)
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Those that are stored, too.")
def main(names: tuple[str, ...], everything: bool) -> None:
    """Write figures case by case, and at the end those of cases that are gone are left out."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    prepare_compiler()
    for case in chosen(names, everything):
        began = time.monotonic()
        found = compiled_figures(case)
        if found["fits"]:
            store({**stored(), case.name: found})
        click.echo(f"{case.name}: {time.monotonic() - began:.0f} s {json.dumps(found)}", err=True)
    store(stored())


if __name__ == "__main__":
    main()
