"""TPU slices as Google's platforms name them: node labels, machine types, names in the TPU API, runtime versions.

Sources: cloud.google.com/tpu/docs/runtimes, cloud.google.com/kubernetes-engine/docs/concepts/tpus, and the tables of
AI-Hypercomputer/xpk (src/xpk/core/system_characteristics.py) and apple/axlearn (cloud/gcp/system_characteristics.py).
"""

import dataclasses
import math

from mesh import UserError
from mesh.topology import Topology


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One generation on Google's platforms.

    Attributes:
        label: value of the node label `cloud.google.com/gke-tpu-accelerator`.
        machine: name of a machine type without its number of chips.
        machines: numbers of chips of the machine types.
        api: name in the Cloud TPU API; None: the generation is not sold there.
        runtime: version of the virtual machines' software in the Cloud TPU API.
        placement: slices with several hosts need a workload policy, whose name is a node label.
    """

    label: str
    machine: str
    machines: tuple[int, ...]
    api: str | None = None
    runtime: str = ""
    placement: bool = False


ACCELERATORS = {
    "v4": Accelerator("tpu-v4-podslice", "ct4p-hightpu", (4,), "v4", "tpu-ubuntu2204-base"),
    "v5e": Accelerator("tpu-v5-lite-podslice", "ct5lp-hightpu", (1, 4, 8), "v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": Accelerator("tpu-v5p-slice", "ct5p-hightpu", (1, 4), "v5p", "v2-alpha-tpuv5"),
    "v6e": Accelerator("tpu-v6e-slice", "ct6e-standard", (1, 4, 8), "v6e", "v2-alpha-tpuv6e"),
    "tpu7x": Accelerator("tpu7x", "tpu7x-standard", (1, 4), placement=True),
}


@dataclasses.dataclass(frozen=True)
class Slices:
    """Equal slices that one program uses, and the machines that they are made of."""

    topology: Topology

    @property
    def accelerator(self) -> Accelerator:
        """The platform's names of the generation."""
        return ACCELERATORS[self.topology.generation.name]

    @property
    def shape(self) -> str:
        """Value of the node label `cloud.google.com/gke-tpu-topology`."""
        return "x".join(map(str, self.topology.shape))

    @property
    def chips(self) -> int:
        """Chips of one slice."""
        return math.prod(self.topology.shape)

    @property
    def hosts(self) -> int:
        """Machines of one slice."""
        return self.topology.hosts // self.topology.slices

    @property
    def host_chips(self) -> int:
        """Chips of a machine, which one process has."""
        return self.chips // self.hosts

    @property
    def machine_type(self) -> str:
        """The machine type, which the topology alone does not say."""
        return f"{self.accelerator.machine}-{self.host_chips}t"

    @property
    def api_type(self) -> str:
        """The accelerator type of the Cloud TPU API; its number counts cores on v4 and v5p."""
        return f"{self.accelerator.api}-{self.chips * self.topology.generation.counted}"

    def check(self, field: str) -> None:
        """Refuse a slice for which there is no machine type (UserError)."""
        known = self.accelerator.machines
        if self.host_chips not in known:
            sold = ", ".join(f"{self.accelerator.machine}-{count}t" for count in known)
            raise UserError(
                f"{field}={self.topology.name}: no machine type has {self.host_chips} chips; there are {sold}"
            )
