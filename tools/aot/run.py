"""The way from an experiment's name to the report of one of its steps."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from axlearn_like.config import ConfigBase
from axlearn_like.training.program import Tuning
from mesh import UserError
from mesh.cost.ahead_of_time import Compiled, compile_step
from mesh.cost.program import Program
from mesh.devices import device_name
from mesh.errors import did_you_mean
from mesh.topology import Topology, topology_devices
from tools.aot.report import Report, report_dict
from tools.experiment import load_experiment


def find_program(cfg: ConfigBase[Any], name: str, devices: list[Any]) -> Program:
    """Return a program of an experiment, checked as far as it can be without a compiler.

    Raises:
        UserError: there is no such program, or sizes do not fit each other.
    """
    known = _said_by(cfg, "programs")(devices)
    if name not in known:
        raise UserError(f"--step {name}: this experiment has no such step{did_you_mean(name, known)}")
    return known[name]()


def tuning_of(cfg: ConfigBase[Any]) -> Tuning:
    """Return the fields that tune the train step of an experiment (UserError: it has no train step)."""
    return _said_by(cfg, "tuning")()


def described(mesh: Mapping[str, int]) -> str:
    """Format a mesh shape, for example "fsdp 4 x tensor 2"."""
    return " x ".join(f"{name} {size}" for name, size in mesh.items() if size != 1) or "one device"


def _said_by(cfg: ConfigBase[Any], method: str) -> Any:
    found = getattr(type(cfg), method, None)
    if not callable(found):
        raise UserError(f"{type(cfg).__qualname__} has nothing to compile; expected an experiment with `{method}`")
    return getattr(cfg, method)


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
