"""Ahead-of-time compilation for TPUs that are not there.

libtpu contains the whole TPU compiler and runs on any x86-64 Linux machine. So these are the programs that a TPU would
run, with the compiler's own plan of their memory, and its refusal where they do not fit. Nothing is executed: whether
results are right is for other tests.
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import dataclasses
import functools
import re
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mesh.cost.arithmetic import Products, products
from mesh.cost.hlo import HloModule, parse
from mesh.errors import UserError
from mesh.programs.interruptible import map_in_threads
from mesh.topology import Topology, topology_devices

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory plan of a compiled program, in bytes of one device.

    Attributes:
        arguments: arguments that the program reads.
        output: output that it writes, those in place of arguments included.
        alias: the part of the output that reuses the memory of arguments.
        temp: temporaries.
        code: code of the program itself.
        host: arguments, results and temporaries in the host's memory.
        peak: the most in use at once, arguments and results included: what the compiler compares with `available`.
            `temp` may be more than its part of that: some temporaries lie where results will. An upper bound where
            arrays lie in the host's memory too: the compiler names the peak of the memory that needs most.
        available: what programs may use.
    """

    arguments: int
    output: int
    alias: int
    temp: int
    code: int
    host: int
    peak: int
    available: int


@dataclasses.dataclass(frozen=True)
class Shortage:
    """The compiler's refusal of a program that does not fit.

    Attributes:
        needed: bytes of what is too large.
        available: bytes of the device.
        what: "HLO temporaries", "arguments" and the like, in the compiler's words.
        message: its first line.
    """

    needed: int
    available: int
    what: str
    message: str


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a compilation on this machine.

    Attributes:
        trace_s: wall seconds to trace and lower the program.
        compile_s: wall seconds to compile it.
        compile_cpu_s: seconds of all threads to trace and compile it; an equal share, of programs compiled together.
        host_rss: largest resident memory of this process so far, in bytes.
    """

    trace_s: float
    compile_s: float
    compile_cpu_s: float
    host_rss: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program, or why there is none.

    Attributes:
        name: name of the step.
        mesh: mesh that it was compiled for.
        topology: topology of the mesh's devices.
        jaxpr: as jax traced it.
        memory: None if it does not fit.
        shortage: None if it fits.
        cost: cost of compiling.
        executable: None if it does not fit.
    """

    name: str
    mesh: Mesh
    topology: Topology
    jaxpr: Any
    memory: Memory | None
    shortage: Shortage | None
    cost: Cost
    executable: jax.stages.Compiled | None

    @functools.cached_property
    def products(self) -> Products:
        """The matrix products that the program computes."""
        return products(self.jaxpr)

    @functools.cached_property
    def hlo(self) -> HloModule | None:
        """The optimised program, as the compiler prints it."""
        text = None if self.executable is None else self.executable.as_text()
        return None if text is None else parse(text)


def compile_step(
    name: str,
    trace: Callable[[], Any],
    mesh: Mesh,
    topology: Topology,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Trace, lower and compile one step; see `compile_steps`."""
    return compile_steps([(name, trace)], mesh, topology, options)[0]


def compile_steps(
    steps: Sequence[tuple[str, Callable[[], Any]]],
    mesh: Mesh,
    topology: Topology,
    options: Mapping[str, Any] | None = None,
) -> list[Compiled]:
    """Trace and lower steps, and compile as many at a time as there are cores.

    Args:
        steps: name of each in messages, and what returns `jitted.trace(*abstract arguments)`; the mesh is in force.
        mesh: mesh of devices of the topology.
        topology: what to compile for.
        options: options of the compiler.

    Raises:
        UserError: the compiler does not take an option.
    """
    cpu, traced, seconds = time.process_time(), [], []
    for _, trace in steps:
        began = time.monotonic()
        with jax.set_mesh(mesh):
            program = trace()
            traced.append((program.jaxpr, program.lower()))
        seconds.append(time.monotonic() - began)

    def compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled | None, Shortage | None, float]:
        began = time.monotonic()
        with jax.set_mesh(mesh):
            return *_compile(lowered, options), time.monotonic() - began

    results = map_in_threads(compiled, [lowered for _, lowered in traced])
    share = (time.process_time() - cpu) / max(1, len(steps))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    found: list[Compiled] = []
    for (name, _), (jaxpr, _), trace_s, result in zip(steps, traced, seconds, results, strict=True):
        executable, shortage, compile_s = result
        cost = Cost(trace_s=trace_s, compile_s=compile_s, compile_cpu_s=share, host_rss=memory)
        plan = None if executable is None else _memory(executable, topology)
        found.append(Compiled(name, mesh, topology, jaxpr, plan, shortage, cost, executable))
    return found


def _compile(
    lowered: jax.stages.Lowered, options: Mapping[str, Any] | None
) -> tuple[jax.stages.Compiled | None, Shortage | None]:
    try:
        return lowered.compile(compiler_options=dict(options) if options else None), None
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" in message:
            return None, read_shortage(message)
        if "compile option" in message or (options and "INTERNAL" not in message):
            named = ", ".join(f"{name}={value}" for name, value in (options or {}).items()) or "of the config"
            raise UserError(f"the compiler refuses with the options {named}: {message.splitlines()[0]}") from None
        raise


def read_shortage(message: str) -> Shortage:
    """Parse the figures in a refusal; 0 for those that it does not have."""
    first = message.splitlines()[0]
    needed = re.search(r"for ([\w ]+?) \(([\d.]+)([KMGT]?)\)", first)
    there = re.search(r"available HBM \(([\d.]+)([KMGT]?)\)", first)
    return Shortage(
        needed=_size(needed[2], needed[3]) if needed else 0,
        available=_size(there[1], there[2]) if there else 0,
        what=needed[1] if needed else "memory",
        message=first,
    )


def _size(number: str, unit: str) -> int:
    return int(float(number) * (1 << _UNITS[unit]))


def _memory(executable: jax.stages.Compiled, topology: Topology) -> Memory:
    plan = executable.memory_analysis()
    assert plan is not None
    used = plan.argument_size_in_bytes + plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    available = memory_per_device(topology)
    host = plan.host_argument_size_in_bytes + plan.host_output_size_in_bytes + plan.host_temp_size_in_bytes
    return Memory(
        arguments=plan.argument_size_in_bytes,
        output=plan.output_size_in_bytes,
        alias=plan.alias_size_in_bytes,
        temp=plan.temp_size_in_bytes,
        code=plan.generated_code_size_in_bytes,
        host=host - plan.host_alias_size_in_bytes,
        # The compiler's peak may be the host's. It accepted the program, so the device's is no more than there is.
        peak=min(plan.peak_memory_in_bytes or used, used, available),
        available=available,
    )


@functools.cache
def memory_per_device(topology: Topology) -> int:
    """Return the bytes that programs may use, read from the compiler's refusal of one that is far too large."""
    device = topology_devices(dataclasses.replace(topology, slices=1))[0]
    huge = jax.ShapeDtypeStruct((1 << 40,), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    lowered = jax.jit(lambda x: x + 1).lower(huge)
    [(_, shortage)] = map_in_threads(lambda one: _compile(one, None), [lowered])
    if shortage is None or not shortage.available:
        raise RuntimeError(f"the compiler for {topology} accepted an array of 2 TiB, or did not say what there is")
    return shortage.available
