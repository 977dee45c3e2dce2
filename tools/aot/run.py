"""The way from an experiment's name to the report of one of its steps."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from axlearn_like.config import ConfigBase
from mesh.cost.ahead_of_time import Compiled, compile_step
from mesh.cost.program import Program
from mesh.devices import device_name
from mesh.topology import Topology, topology_devices
from tools.aot.programs import find_program
from tools.aot.report import Report, report_dict
from tools.experiment import load_experiment


class Outcome(NamedTuple):
    """A program, and what the compiler made of it."""

    program: Program
    compiled: Compiled
    report: Report


def load_for(experiment: str, sets: Sequence[str], topology: Topology, applied: Sequence[str] = ()) -> ConfigBase[Any]:
    """Return the experiment's config as it would be on these devices: mesh rules first, then modifiers and edits."""
    return load_experiment(experiment, sets, device=lambda: device_name(topology_devices(topology)), applied=applied)


def compile_experiment(
    cfg: ConfigBase[Any], step: str, topology: Topology, options: Mapping[str, str] | None = None
) -> Outcome:
    """Compile one step (UserError: sizes do not fit each other; it is known before anything is compiled)."""
    program = find_program(cfg, step, topology_devices(topology))
    compiled = compile_step(program.name, program.trace, program.mesh, topology, options)
    return Outcome(program, compiled, report_dict(program, compiled))
