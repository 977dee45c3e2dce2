"""The arguments of a program, and how they are sharded."""

import dataclasses
from typing import Any

from mesh.cost.buffers import argument_path


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array that a program reads.

    Attributes:
        path: path of it in the state or the batch: "state.params.embedding.weight".
        array: type and shape, of all devices together: "float32[32000,4096]".
        axes: for each dimension the mesh axes over which it is sharded, "-" for none: "tensor, fsdp".
        on_host: kept in the memory of the host.
    """

    path: str
    array: str
    axes: str
    on_host: bool

    def __str__(self) -> str:
        where = f" sharded over ({self.axes})" if self.axes.strip("-, ") else " on every device"
        return f"{self.path}: {self.array}{where}{' on the host' if self.on_host else ''}"


def arguments(jaxpr: Any) -> list[Argument]:
    """Return the arguments of a traced program, in its order."""
    names = jaxpr.jaxpr.debug_info.arg_names or ()
    avals = jaxpr.in_avals
    if len(names) != len(avals):  # closed-over arrays go first, without names
        names = [*(f"constant {index}" for index in range(len(avals) - len(names))), *names]
    return [_argument(str(name), aval) for name, aval in zip(names, avals, strict=True)]


def _argument(name: str, aval: Any) -> Argument:
    spec = tuple(aval.sharding.spec)
    axes = [*spec, *[None] * (len(aval.shape) - len(spec))]
    text = ", ".join("-" if not one else one if isinstance(one, str) else "+".join(one) for one in axes)
    array = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
    return Argument(argument_path(name), array, text, "host" in str(getattr(aval, "memory_space", "")).lower())
