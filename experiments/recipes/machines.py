"""Machines that a job is fitted to: memory, peak figures and parts of them, by their text or as they are here."""

import dataclasses
import os

from axlearn_like.operations.utilisation import GPU_PEAKS
from mesh.errors import UserError
from mesh.generations import find_generation, generation_of
from mesh.topology import Topology, parse_topology
from rl.fleet.devices import RoleDevices, gpu_text, parse_devices

# Share of the memory of a TPU as it is sold that the compiler leaves to programs: 0.961 (v4) to 1.008 (v5p).
_OF_TPU = 0.96
# Share of the memory of a GPU that XLA allocates by default (docs.jax.dev/en/latest/gpu_memory_allocation.html).
_OF_GPU = 0.75
# bfloat16 FLOP/s and bytes/s of a GPU that GPU_PEAKS does not know: of an L4, half and whole (NVIDIA's data sheet).
_UNKNOWN_GPU = (60e12, 0.3e12)
_OF_HOST = 0.5  # share of a machine's memory: data and processes have the rest


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind."""

    text: str  # devices as a fleet names them: "v5e:2x4", "h100:8", "cpu:2"
    name: str  # kind and number, which mesh rules match
    platform: str
    count: int  # number of devices
    host: int  # devices of the largest machine that is sold by itself
    memory: int  # bytes of a device that programs can use
    source: str  # origin of that figure
    flops: float | None = None  # bfloat16 FLOP/s of a device; None: not known
    bandwidth: float | None = None  # bytes/s of a device's memory; None: not known
    topology: Topology | None = None

    def part(self, devices: int) -> str | None:
        """Return the text of so many such devices, which can be had by themselves; None: there is no such slice."""
        if self.topology is None:
            return f"{self.text.partition(':')[0]}:{devices}"
        generation = self.topology.generation
        chips, rest = divmod(devices, generation.devices)
        try:
            return None if rest else parse_topology(f"{generation.name}-{chips * generation.counted}").name
        except UserError:
            return None


def find_machine(devices: str | RoleDevices, field: str = "devices") -> Machine:
    """Return a machine by its devices, or their text: `v5e:2x4`, `h100:8`, `here`, or as `mesh.device_name` has them.

    Args:
        devices: these.
        field: option that has them, for messages.

    Raises:
        UserError: there are no such devices, or nothing is known of their memory.
    """
    found = _described(devices, field) if isinstance(devices, str) else devices
    first, count = found.described[0], len(found.described)
    kind, topology, figures = found.platform, found.topology, (None, None)
    host = found.host_chips * (topology.generation.devices if topology else 1)
    if found.platform == "cpu":
        memory = int(_OF_HOST * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / count)
        source = f"{_OF_HOST:.0%} of this machine's memory"
    elif found.platform == "gpu" and (kind := gpu_text(found.described)) in GPU_PEAKS:
        sold, figures = parse_devices(f"{kind}:1", "devices").memory or 0, GPU_PEAKS[kind]
        memory, source = int(_OF_GPU * sold * found.share), f"{_OF_GPU:.0%} of it, what XLA allocates by default"
    elif generation := topology.generation if topology else generation_of(first):
        chips = count // generation.devices
        topology = topology or parse_topology(f"{generation.name}-{chips * generation.counted}")
        memory, source = int(_OF_TPU * generation.per_device(generation.hbm)), f"{_OF_TPU:.0%} of it, as sold"
        if generation.flops:  # else described by its user
            figures = generation.per_device(generation.flops), generation.per_device(generation.hbm_bandwidth)
    elif memory := getattr(first, "memory", None) or found.memory:
        of, figures = (1.0 if found.memory is None else _OF_GPU), _UNKNOWN_GPU
        memory, tera, giga = int(of * memory * found.share), figures[0] / 1e12, figures[1] / 1e9
        said = "as it says" if found.memory is None else f"{_OF_GPU:.0%} of what you say"
        kind = kind if found.memory is None else found.text.partition(":")[0]
        source = f"{said}; {first.device_kind} is taken to do {tera:.0f} TFLOP/s and to read {giga:.0f} GB/s"
    else:
        raise UserError(
            f"{field}={found.text!r}: nothing is known of the memory of {first.device_kind}; expected it in GiB, as in "
            f"gpu[memory=24]:{count}, `here` on the machine itself, or one of {', '.join(GPU_PEAKS)}"
        )
    text = str(topology) if topology else f"{kind}:{count}"
    return Machine(text, found.name, found.platform, count, host, memory, source, *figures, topology)


def _described(text: str, field: str) -> RoleDevices:
    kind, _, count = text.rpartition("-")
    named = next((name for name in GPU_PEAKS if kind.startswith("gpu-") and name in kind), None)
    if named or kind == "cpu":
        return parse_devices(f"{named or kind}:{count}", field)
    generation = find_generation(kind.removeprefix("tpu-"))
    if generation is not None and kind.startswith("tpu"):
        text = f"{generation.name}-{int(count) // generation.devices * generation.counted}"
    return parse_devices(text, field)
