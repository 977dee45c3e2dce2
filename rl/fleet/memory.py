"""Memory and time of a role's programs by the TPU compiler, kept on disk: the same lowered program is compiled once."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import jax

from mesh.cost.ahead_of_time import Compiled, compile_step, memory_per_device
from mesh.cost.collectives import collectives
from mesh.cost.program import Program
from mesh.cost.roofline import estimate
from mesh.files.cache_directory import cache_directory
from mesh.files.written import replace_file
from mesh.topology import Topology, compiler_version


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one device that a program needs, and the time of a run of it."""

    arguments: int  # arguments that it reads; those of a policy and its optimizer, or weights and pages, among them
    beside: int  # everything else: temporaries, and results that do not take the place of arguments
    available: int  # bytes available to programs
    # The compiler's words if the program does not fit; then the sizes are what it says, or 0
    refusal: str | None = None
    seconds: float | None = None  # estimate of a run (`mesh.cost.roofline`); None: does not fit, or was not asked for

    @property
    def needed(self) -> int:
        """All bytes together."""
        return self.arguments + self.beside


def program_memory(
    program: Program, topology: Topology, options: Mapping[str, str] | None = None, *, timed: bool = True
) -> ProgramMemory:
    """Return what a program needs on a device, compiled with these options, and if `timed` how long it runs."""
    with jax.set_mesh(program.mesh):
        traced = program.trace()
        text = traced.lower().as_text()
    path = _stored(text, topology, ("peak and seconds" if timed else "peak", json.dumps(options) if options else ""))
    if path.exists():
        return ProgramMemory(**json.loads(path.read_text()))
    compiled = compile_step(program.name, lambda: traced, program.mesh, topology, options)
    if compiled.memory is None:
        shortage = compiled.shortage
        message, needed = ("", 0) if shortage is None else (shortage.message, shortage.needed)
        found = ProgramMemory(0, needed, memory_per_device(topology), message)
    else:
        plan = compiled.memory
        rest = plan.peak - plan.arguments
        found = ProgramMemory(plan.arguments, rest, plan.available, seconds=_seconds(compiled) if timed else None)
    replace_file(path, json.dumps(dataclasses.asdict(found)))
    return found


def _seconds(compiled: Compiled) -> float | None:
    if compiled.hlo is None:
        return None
    found, work = collectives(compiled.hlo, compiled.mesh), compiled.products
    sizes = {"flops": work.xla, "kernel_flops": work.kernels}
    return estimate(compiled.hlo, compiled.mesh, compiled.topology, found, **sizes).step


def _stored(text: str, topology: Topology, asked: tuple[str, str]) -> Path:
    made_by = f"{asked[0]}, {topology}, {jax.__version__}, {compiler_version()}{asked[1]}\n"
    return cache_directory("plans") / f"{hashlib.sha256((made_by + text).encode()).hexdigest()}.json"
