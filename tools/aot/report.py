"""The report of `axl aot` on a compiled step, as data."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from mesh.cost.ahead_of_time import Compiled
from mesh.cost.buffers import argument_path, largest_buffers
from mesh.cost.collectives import by_axis, collectives
from mesh.cost.program import Program
from mesh.cost.roofline import TRUST, estimate
from mesh.cost.traced_buffers import kept_for_backward, largest_traced
from mesh.topology import Topology, compiler_version

Report = dict[str, Any]


def report_dict(program: Program, compiled: Compiled) -> Report:
    """Return everything that is known of a step; JSON-able. All bytes and seconds are of one device and one step.

    For a step that does not fit there are no figures of the compiler's plan: `oom` has its refusal, and the largest
    arrays are those of the traced program, before any fusion.
    """
    topology, mesh = compiled.topology, compiled.mesh
    chip = topology.generation
    report: Report = {
        "step": program.name,
        **describe_topology(topology),
        "mesh": {name: size for name, size in mesh.shape.items() if size > 1},
        "fits": compiled.shortage is None,
        "hbm": None if compiled.memory is None else dataclasses.asdict(compiled.memory),
        "rows": program.rows,
        "length": program.length,
        "flops_analytic": program.flops,
        "flops_of": program.counted,
        "flops_executed": compiled.products.total,
        "flops_in_kernels": compiled.products.kernels,
        "collectives": None,
        "roofline_s": None,
        "estimated_step_s": None,
        "mfu_estimate": None,
        "kept_for_backward": kept_for_backward(compiled.jaxpr),
        "arguments": list(map(str, arguments(compiled.jaxpr))),
        "largest_buffers": [],
        "oom": None if compiled.shortage is None else dataclasses.asdict(compiled.shortage),
        "unknown_loops": 0,
        "compile_s": round(compiled.cost.compile_s, 2),
        "trace_s": round(compiled.cost.trace_s, 2),
        "compile_cpu_s": round(compiled.cost.compile_cpu_s, 2),
        "host_rss": compiled.cost.host_rss,
        "versions": {"jax": jax.__version__, "libtpu": compiler_version()},
        "trust": TRUST,
    }
    if compiled.hlo is None:
        report["largest_buffers"] = list(map(dataclasses.asdict, largest_traced(compiled.jaxpr)))
        return report
    found = collectives(compiled.hlo, mesh)
    time = estimate(
        compiled.hlo,
        mesh,
        topology,
        found,
        flops=compiled.products.xla,
        kernel_flops=compiled.products.kernels,
    )
    peak = chip.per_device(chip.flops) * mesh.devices.size
    report |= {
        "collectives": by_axis(found, time.hidden),
        "roofline_s": {"compute": time.compute, "hbm": time.hbm, **{f"link {a}": s for a, s in time.links.items()}},
        "exposed_s": time.exposed,
        "estimated_step_s": time.step,
        "mfu_estimate": program.flops / peak / time.step if time.step else None,
        "largest_buffers": list(map(dataclasses.asdict, largest_buffers(compiled.hlo))),
        "unknown_loops": compiled.hlo.unknown_loops(),
    }
    return report


def describe_topology(topology: Topology) -> Mapping[str, Any]:
    """Return the names and the size of a topology, as reports have them."""
    return {
        "topology": topology.name,
        "sold_as": topology.sold_as,
        "slices": topology.slices,
        "devices": topology.devices,
    }


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array that a program reads."""

    path: str  # path of it in the state or the batch: "state.params.embedding.weight"
    array: str  # type and shape, of all devices together: "float32[32000,4096]"
    axes: str  # mesh axes over which each dimension is sharded, "-" for none: "tensor, fsdp"
    on_host: bool  # kept in the memory of the host

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
