"""TPU slices as Google's platforms name them: node labels, machine types, names in the TPU API, runtime versions.

Sources: cloud.google.com/tpu/docs/runtimes, cloud.google.com/kubernetes-engine/docs/concepts/tpus, and the tables of
AI-Hypercomputer/xpk (src/xpk/core/system_characteristics.py) and apple/axlearn (cloud/gcp/system_characteristics.py).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from mesh import UserError
from mesh.errors import did_you_mean
from mesh.generations import Generation, describe_generation
from mesh.topology import Topology, parse_topology
from tools.launch.names import check_value


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One generation on Google's platforms.

    Attributes:
        label: value of the node label `cloud.google.com/gke-tpu-accelerator`.
        machine: name of a machine type, with {chips} in the place of its number of chips.
        machines: numbers of chips of the machine types; empty: not known.
        api: name in the Cloud TPU API; None: the generation is not sold there.
        runtime: version of the virtual machines' software in the Cloud TPU API.
        placement: slices with several hosts need a workload policy, whose name is a node label.
    """

    label: str
    machine: str
    machines: tuple[int, ...] = ()
    api: str | None = None
    runtime: str = ""
    placement: bool = False


ACCELERATORS = {
    "v4": Accelerator("tpu-v4-podslice", "ct4p-hightpu-{chips}t", (4,), "v4", "tpu-ubuntu2204-base"),
    "v5e": Accelerator("tpu-v5-lite-podslice", "ct5lp-hightpu-{chips}t", (1, 4, 8), "v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": Accelerator("tpu-v5p-slice", "ct5p-hightpu-{chips}t", (1, 4), "v5p", "v2-alpha-tpuv5"),
    "v6e": Accelerator("tpu-v6e-slice", "ct6e-standard-{chips}t", (1, 4, 8), "v6e", "v2-alpha-tpuv6e"),
    "tpu7x": Accelerator("tpu7x", "tpu7x-standard-{chips}t", (1, 4), placement=True),
}
Kinds = Mapping[
    str, Mapping[str, str | int | float | bool]
]  # generations that the table lacks, as a user describes them
_PLATFORM = {"label": str, "machine": str, "placement": bool}  # facts of a kind that are the platform's


@dataclasses.dataclass(frozen=True)
class Slices:
    """Equal slices that one program uses, and the machines that they are made of."""

    topology: Topology
    accelerator: Accelerator

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
        return self._machine(self.host_chips)

    def check(self, field: str) -> None:
        """Refuse a slice for which there is no machine type (UserError)."""
        known = self.accelerator.machines
        if known and self.host_chips not in known:
            sold = ", ".join(map(self._machine, known))
            raise UserError(
                f"{field}={self.topology.name}: no machine type has {self.host_chips} chips; there are {sold}"
            )

    def _machine(self, chips: int) -> str:
        return self.accelerator.machine.replace("{chips}", str(chips))


def find_slices(text: str, field: str, count: int, kinds: Kinds) -> Slices:
    """Return the slices that a text names, of a generation of the table or of `kinds`.

    Raises:
        UserError: there is no such generation, slice or machine.
    """
    name, _, shape = text.strip().lower().partition(":")
    if name in kinds:
        generation, accelerator = described(name, kinds[name])
        found = Slices(parse_topology(f"{name}[{generation.described}]:{shape}", count), accelerator)
    else:
        topology = parse_topology(text, count)
        if topology.generation.described:
            raise UserError(
                f"{field}={text}: expected {topology.name}, and launch.kinds describes {name.partition('[')[0]}"
            )
        found = Slices(topology, ACCELERATORS[topology.generation.name])
    found.check(field)
    return found


def described(name: str, facts: Mapping[str, Any]) -> tuple[Generation, Accelerator]:
    """Return generation and platform's names of a kind that only its user knows of.

    Raises:
        UserError: a fact is missing, unknown or of another type.
    """
    own = {fact: value for fact, value in facts.items() if fact in _PLATFORM}
    others = {fact: value for fact, value in facts.items() if fact not in _PLATFORM}
    known = ("memory", "host", "devices", "shown", *_PLATFORM)
    for fact in others:
        if fact not in known:
            raise UserError(f"{name}: no fact {fact!r}{did_you_mean(fact, known)}")
    generation = describe_generation(name, others)
    for fact, kind in _PLATFORM.items():
        if fact != "placement" and fact not in own:
            raise UserError(f"{name}: expected {fact!r}, {_MEANING[fact]}")
        if fact in own and not isinstance(own[fact], kind):
            raise UserError(f"{name}: expected {fact} to be a {kind.__name__}, got {own[fact]!r}")
    check_value(own["label"], f"{name}.label")
    check_value(own["machine"].replace("{chips}", "4"), f"{name}.machine")
    return generation, Accelerator(own["label"], own["machine"], placement=bool(own.get("placement")))


_MEANING = {
    "label": "the value of the node label cloud.google.com/gke-tpu-accelerator",
    "machine": "the machine type, such as ct9x-standard-4t, or ct9x-standard-{chips}t for those of several sizes",
}
