"""Machines with TPUs and GPUs as Google's platforms name them: node labels, machine types, names in the TPU API.

Sources: cloud.google.com/tpu/docs/runtimes, cloud.google.com/kubernetes-engine/docs/concepts/tpus and /how-to/gpus, and
the tables of AI-Hypercomputer/xpk (src/xpk/core/system_characteristics.py) and apple/axlearn
(cloud/gcp/system_characteristics.py).
"""

import dataclasses

from mesh import UserError
from mesh.topology import Topology
from rl.fleet.devices import RoleDevices, parse_devices


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Machines with one kind of accelerator on Google's platforms."""

    label: str  # value of the node label `cloud.google.com/gke-tpu-accelerator`; of GPUs, of `gke-accelerator`
    machine: str  # name of a machine type, with {chips} in the place of its number of chips
    machines: tuple[int, ...] = ()  # numbers of chips of the machine types; empty: not known
    api: str | None = None  # name in the Cloud TPU API; None: the generation is not sold there
    runtime: str = ""  # version of the virtual machines' software in the Cloud TPU API
    placement: bool = False  # slices with several hosts need a workload policy, whose name is a node label
    devices: str = ""  # GPU as a fleet names it; empty: it is a TPU
    fabric: str = ""  # network of GPUs of several machines (kubernetes/fabric.py); empty: TCP alone


_PARTS = (1, 2, 4, 8)
ACCELERATORS = {
    "v4": Accelerator("tpu-v4-podslice", "ct4p-hightpu-{chips}t", (4,), "v4", "tpu-ubuntu2204-base"),
    "v5e": Accelerator("tpu-v5-lite-podslice", "ct5lp-hightpu-{chips}t", (1, 4, 8), "v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": Accelerator("tpu-v5p-slice", "ct5p-hightpu-{chips}t", (1, 4), "v5p", "v2-alpha-tpuv5"),
    "v6e": Accelerator("tpu-v6e-slice", "ct6e-standard-{chips}t", (1, 4, 8), "v6e", "v2-alpha-tpuv6e"),
    "tpu7x": Accelerator("tpu7x", "tpu7x-standard-{chips}t", (1, 4), placement=True),
    "a100": Accelerator("nvidia-a100-80gb", "a2-ultragpu-{chips}g", _PARTS, devices="a100"),
    "h100": Accelerator("nvidia-h100-80gb", "a3-highgpu-{chips}g", _PARTS, devices="h100", fabric="tcpx"),
    "h100-mega": Accelerator("nvidia-h100-mega-80gb", "a3-megagpu-8g", (8,), devices="h100", fabric="tcpxo"),
    "h200": Accelerator("nvidia-h200-141gb", "a3-ultragpu-8g", (8,), devices="h200", fabric="rdma"),
    "b200": Accelerator("nvidia-b200", "a4-highgpu-8g", (8,), devices="b200", fabric="rdma"),
    "gpu": Accelerator("", "GPUs of any model", devices="gpu"),  # any machine, where none is asked for by its name
}


@dataclasses.dataclass(frozen=True)
class Slices:
    """Equal groups of machines that one program uses: TPU slices, or hosts of GPUs."""

    text: str  # one of them, as a fleet names it
    devices: RoleDevices  # devices of all
    accelerator: Accelerator  # names of the machines on the platform
    kind: str  # TPU generation, or kind of GPU
    count: int = 1  # number of groups

    def __str__(self) -> str:
        name = self.text if self.devices.topology is None else self.topology.name
        return name if self.count == 1 else f"{self.count} x {name}"

    @property
    def topology(self) -> Topology:
        """Topology of TPU slices."""
        assert self.devices.topology is not None, "of TPUs"
        return self.devices.topology

    @property
    def gpus(self) -> bool:
        """True for GPUs, False for TPUs."""
        return self.devices.topology is None

    @property
    def resource(self) -> str:
        """Resource of Kubernetes that a chip is."""
        return "nvidia.com/gpu" if self.gpus else "google.com/tpu"

    @property
    def shape(self) -> str:
        """Value of the node label `cloud.google.com/gke-tpu-topology`."""
        return "x".join(map(str, self.topology.shape))

    @property
    def chips(self) -> int:
        """Chips, or GPUs, of one slice."""
        return self.devices.chips // self.count

    @property
    def hosts(self) -> int:
        """Machines of one slice."""
        return self.devices.hosts // self.count

    @property
    def host_chips(self) -> int:
        """Chips of a machine, which one process has."""
        return self.chips // self.hosts

    @property
    def machine_type(self) -> str:
        """The machine type, which the topology alone does not say."""
        return self._machine(self.host_chips)

    def node_selector(self) -> dict[str, str]:
        """Return the labels of GKE nodes that are such machines."""
        if self.gpus:
            kind = {"cloud.google.com/gke-accelerator": self.accelerator.label}
        else:
            label = {"cloud.google.com/gke-tpu-accelerator": self.accelerator.label}
            kind = {**label, "cloud.google.com/gke-tpu-topology": self.shape}
        # One topology may be of machines of two sizes.
        return {**kind, "node.kubernetes.io/instance-type": self.machine_type}

    def check(self, field: str) -> None:
        """Refuse a slice for which there is no machine type (UserError)."""
        known = self.accelerator.machines
        if known and self.host_chips not in known:
            sold = ", ".join(map(self._machine, known))
            what = "GPUs" if self.gpus else "chips"
            raise UserError(f"{field}={self.text}: no machine type has {self.host_chips} {what}; there are {sold}")

    def _machine(self, chips: int) -> str:
        return self.accelerator.machine.replace("{chips}", str(chips))


def is_gpu(text: str) -> bool:
    """Return True if a text names GPUs of the table."""
    accelerator = ACCELERATORS.get(text.strip().lower().partition(":")[0])
    return accelerator is not None and bool(accelerator.devices)


def find_slices(text: str, field: str, count: int) -> Slices:
    """Return the machines that a text names (`v5p:4x4x4`, `h100:8`).

    Raises:
        UserError: there is no such generation or slice, or its machines have no names here.
    """
    name, _, shape = text.strip().lower().partition(":")
    accelerator = ACCELERATORS.get(name)
    gpus = accelerator is not None and accelerator.devices
    one = f"{gpus}:{shape}" if gpus else text.strip().lower()
    devices = parse_devices(one, field, count)
    topology = devices.topology
    if topology is not None:
        name = topology.generation.name
        if name not in ACCELERATORS:
            raise UserError(f"{field}={text}: expected a TPU whose machines are known here: {', '.join(_TPUS)}")
        one, accelerator = topology.text, ACCELERATORS[name]
    elif accelerator is None or devices.share < 1:
        known = ", ".join(kind for kind, one in ACCELERATORS.items() if one.devices)
        raise UserError(f"{field}={text}: expected whole GPUs of a machine, such as h100:8; known: {known}")
    return Slices(one, devices, accelerator, name, count)


_TPUS = [name for name, one in ACCELERATORS.items() if not one.devices]
