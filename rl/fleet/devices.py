"""Devices of a role by their text: a TPU slice (`v5p:4x4x4`), GPUs (`h100:8`), CPUs (`cpu:4`), this machine's."""

import dataclasses
import re
from typing import Any

from mesh import UserError
from mesh.devices import device_name, find_devices
from mesh.errors import did_you_mean
from mesh.mesh import PlaceholderDevice
from mesh.topology import Topology, parse_topology, topology_devices

HERE = "here"  # the devices of this machine
# Name -> what jax calls it, and bytes of memory, by its maker. A host has eight.
_GPUS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 80 << 30),
    "h100": ("NVIDIA H100 80GB HBM3", 80 << 30),
    "h200": ("NVIDIA H200", 141 * 10**9),
    "b200": ("NVIDIA B200", 180 * 10**9),
}
_GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class RoleDevices:
    """Devices that one instance of a role has to itself.

    Attributes:
        text: as the fleet names them.
        described: placeholders, one for each.
        chips: as they are sold; 0 for CPUs.
        hosts: with one process each.
        memory: bytes of a device, as sold; None: of CPUs, or not known.
        topology: of TPUs that are not of this machine.
    """

    text: str
    described: tuple[Any, ...]
    chips: int
    hosts: int
    memory: int | None = None
    topology: Topology | None = None

    def compilable(self) -> list[Any]:
        """Return devices for which programs can be compiled here, in the order in which a mesh takes them.

        Raises:
            UserError: the TPU compiler is not installed. ValueError: they are no TPUs.
        """
        if self.topology is None:
            raise ValueError(f"{self.text}: only programs for TPUs are compiled without the devices")
        return topology_devices(self.topology)

    @property
    def name(self) -> str:
        """Kind and number, which mesh rules match."""
        return device_name(self.described)

    @property
    def each_host(self) -> int:
        """Devices of a host."""
        return len(self.described) // self.hosts


def parse_count(text: str, field: str) -> tuple[int, str]:
    """Split `64 x v5p:2x2x1` into number and devices; the number is 1 where there is none (UserError: it is 0)."""
    found = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\S+)\s*", text)
    if found is None or found[1] and not int(found[1]):
        raise UserError(f"{field}={text!r}: expected devices such as v5p:4x4x4, 64 x v5p:2x2x1, h100:8 or {HERE}")
    return int(found[1] or 1), found[2]


def parse_devices(text: str, field: str, slices: int = 1) -> RoleDevices:
    """Return the devices that a text describes; `slices` TPU slices of a kind belong to one instance.

    Raises:
        UserError: names the field, and the nearest there are.
    """
    if text == HERE:
        found = find_devices()
        chips = 0 if found[0].platform == "cpu" else len(found)
        return RoleDevices(HERE, tuple(found), chips, 1)
    kind, _, size = text.lower().partition(":")
    if kind in ("cpu", *_GPUS):
        return _counted(text, kind, size, field)
    try:
        topology = parse_topology(text, slices)
    except UserError as error:
        near = did_you_mean(kind, _GPUS) if re.fullmatch(r"[a-z]+\d+0+", kind) else ""
        raise UserError(f"{field}={text!r}: {error}{near}") from None
    generation = topology.generation
    kind = "TPU7x" if generation.name == "tpu7x" else f"TPU {generation.name}"
    described = tuple(PlaceholderDevice("tpu", kind) for _ in range(topology.devices))
    memory = int(generation.per_device(generation.hbm))
    chips = topology.devices // generation.devices
    return RoleDevices(str(topology), described, chips, topology.hosts, memory, topology)


def _counted(text: str, kind: str, size: str, field: str) -> RoleDevices:
    if not size.isdecimal() or not int(size):
        raise UserError(f"{field}={text!r}: expected how many, as in {kind}:8")
    count = int(size)
    if kind == "cpu":
        return RoleDevices(text, tuple(PlaceholderDevice() for _ in range(count)), 0, 1)
    if count > _GPUS_PER_HOST and count % _GPUS_PER_HOST:
        raise UserError(f"{field}={text!r}: expected up to {_GPUS_PER_HOST}, a host's, or a multiple of it")
    name, memory = _GPUS[kind]
    described = tuple(PlaceholderDevice("gpu", name) for _ in range(count))
    return RoleDevices(text, described, count, max(1, count // _GPUS_PER_HOST), memory)
