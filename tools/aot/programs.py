"""The programs of an experiment, as `axl aot` asks for them: by name, on the devices of a topology."""

from collections.abc import Mapping
from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.training.program import Tuning
from mesh import UserError
from mesh.cost.program import Program
from mesh.errors import did_you_mean


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
