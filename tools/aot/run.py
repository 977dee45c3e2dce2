"""From an experiment's name to the report of one of its steps."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from axlearn_like.config import ConfigBase
from mesh.cost.ahead_of_time import Compiled, compile_step
from mesh.devices import device_name
from mesh.topology import Topology, topology_devices
from tools.aot.report import Report, report_dict
from tools.aot.steps import Step, find_step
from tools.experiment import load_experiment


class Outcome(NamedTuple):
    """A step and what the compiler made of it."""

    step: Step
    compiled: Compiled
    report: Report


def load_for(experiment: str, sets: Sequence[str], topology: Topology) -> ConfigBase[Any]:
    """The experiment's config as it would be on these devices: mesh rules first, then the edits."""
    return load_experiment(experiment, sets, device=lambda: device_name(topology_devices(topology)))


def compile_experiment(
    cfg: ConfigBase[Any], step: str, topology: Topology, options: Mapping[str, str] | None = None
) -> Outcome:
    """Compile one step.

    Raises:
        UserError: sizes do not fit each other; it is known before anything is compiled.
    """
    found = find_step(cfg, step, topology_devices(topology))
    compiled = compile_step(found.name, found.trace, found.mesh, topology, options)
    return Outcome(found, compiled, report_dict(found, compiled))
