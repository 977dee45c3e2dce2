"""Devices of a role by their text: a TPU slice (`v5p:4x4x4`), GPUs (`h100:8`), CPUs (`cpu:4`), this machine's.

GPUs outside the table are described by the GiB of each: `gpu[memory=24]:2`.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mesh import UserError
from mesh.devices import device_name, find_devices
from mesh.errors import did_you_mean
from mesh.generations import GENERATIONS, find_generation
from mesh.mesh import PlaceholderDevice
from mesh.topology import Topology, parse_topology, topology_devices

HERE = "here"  # the devices of this machine
ANY_GPU = "gpu"  # GPU of a model outside the table
# Name -> what jax calls it, and bytes of memory, by its maker. A host has eight.
_GPUS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 80 << 30),
    "h100": ("NVIDIA H100 80GB HBM3", 80 << 30),
    "h200": ("NVIDIA H200", 141 * 10**9),
    "b200": ("NVIDIA B200", 180 * 10**9),
    ANY_GPU: ("GPU", None),
}
_GPUS_PER_HOST = 8
_DESCRIBED_GPU = re.compile(rf"{ANY_GPU}\[memory=(\d+(?:\.\d+)?)\]")
_SMALLEST_SHARE = 0.01  # smallest share of a GPU


@dataclasses.dataclass(frozen=True)
class RoleDevices:
    """Devices that one instance of a role has to itself."""

    text: str  # words of the fleet
    described: tuple[Any, ...]  # placeholders, one for each
    chips: int  # number, counted as they are sold; 0 for CPUs
    hosts: int  # machines, with one process each
    memory: int | None = None  # bytes of a device, as sold; None: of CPUs, or not known
    topology: Topology | None = None  # topology of TPUs that are not of this machine
    share: float = 1.0  # share of its only device, in (0, 1]; other roles have the rest
    model: str | None = None  # model of described GPUs: "H100"; None: any

    def compilable(self) -> list[Any]:
        """Return devices to compile for, in a mesh's order (UserError: no TPU compiler; ValueError: no TPUs)."""
        if self.topology is None:
            raise ValueError(f"{self.text}: only programs for TPUs are compiled without the devices")
        return topology_devices(self.topology)

    @property
    def name(self) -> str:
        """Kind and number, which mesh rules match."""
        return device_name(self.described)

    @property
    def kind(self) -> str:
        """Kind of chip, as a fleet writes it: v5p, h100, cpu, here."""
        return parse_count(self.text, "fleet")[1].partition(":")[0]

    @property
    def platform(self) -> str:
        """The platform by its name in jax: cpu, gpu, tpu."""
        return self.described[0].platform

    @property
    def each_host(self) -> int:
        """Devices of a host."""
        return len(self.described) // self.hosts

    @property
    def host_chips(self) -> int:
        """The number of chips of the largest machine with such devices."""
        return _GPUS_PER_HOST if self.topology is None else self.topology.generation.largest_host


def parse_count(text: str, field: str) -> tuple[int, str]:
    """Split `64 x v5p:2x2x1` into number and devices; the number is 1 where there is none (UserError: it is 0)."""
    found = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?((?:\d+\s*x\s*)?\S+)\s*", text)
    if found is None or found[1] and not int(found[1]):
        raise UserError(f"{field}={text!r}: expected devices such as v5p:4x4x4, 64 x v5p:2x2x1, h100:8 or {HERE}")
    return int(found[1] or 1), found[2]


def parse_devices(text: str, field: str, slices: int = 1) -> RoleDevices:
    """Return the devices of a text, `slices` of them for an instance (UserError: names the field and the nearest)."""
    if text == HERE:
        found = find_devices()
        chips = 0 if found[0].platform == "cpu" else len(found)
        return RoleDevices(HERE, tuple(found), chips, 1)
    kind, _, size = text.lower().partition(":")
    said = _DESCRIBED_GPU.fullmatch(kind)
    if said is not None:
        found = _counted(text.lower(), ANY_GPU, size, field, slices)
        return dataclasses.replace(found, memory=int(float(said[1]) * (1 << 30)))
    if kind in ("cpu", *_GPUS):
        share = _share(text, kind, size, field) if "." in size else 1.0
        if share < 1 and slices > 1:
            raise UserError(f"{field}='{slices} x {text}': a share of a GPU is one process; expected {text}")
        found = _counted(text, kind, "1" if share < 1 else size, field, slices)
        memory = None if found.memory is None else int(share * found.memory)
        return dataclasses.replace(found, share=share, memory=memory)
    try:
        topology = parse_topology(text, slices)
    except UserError as error:
        if "." in size and kind in GENERATIONS:
            raise UserError(
                f"{field}={text!r}: roles cannot share a TPU chip, because libtpu lets in one process; only GPUs are "
                "shared (h100:0.5). All roles in one process use one chip: --runtime inprocess"
            ) from None
        raise UserError(f"{field}={text!r}: {_nearest(text.lower(), kind) or error}") from None
    generation = topology.generation
    kind = generation.shown or f"TPU {generation.name}"
    described = tuple(PlaceholderDevice("tpu", kind) for _ in range(topology.devices))
    memory = int(generation.per_device(generation.hbm))
    chips = topology.devices // generation.devices
    return RoleDevices(str(topology), described, chips, topology.hosts, memory, topology)


def _nearest(text: str, kind: str) -> str:
    """Return what is said of devices of no generation of TPUs; "" where it is one of them."""
    if find_generation(re.split(r"[-\[]", kind)[0]) is not None or "[" in kind and not kind.startswith(ANY_GPU):
        return ""
    others = (
        f"other GPUs are described: {ANY_GPU}[memory=24]:2, GiB of each; other TPUs too: v9x[memory=64;host=4]:2x2x4"
    )
    if (named := next((name for name in _GPUS if name in text), None)) is not None:
        number = re.search(r"[1-9][0-9]*", text.partition(":")[2] or text.replace(named, ""))
        return f"did you mean {named}:{number.group() if number else 1}? {others}"
    known = ("cpu", *_GPUS, *GENERATIONS)
    return f"there are no devices {kind!r}{did_you_mean(kind, known, limit=len(known))}; {others}"


def gpu_text(devices: Sequence[Any]) -> str:
    """Return the kind of these GPUs as a fleet writes it: "h200", or "gpu" for those that are not in the table."""
    known = {name: text for text, (name, _) in _GPUS.items()}
    return known.get(devices[0].device_kind, ANY_GPU)


def _share(text: str, kind: str, size: str, field: str) -> float:
    """Return the share of one GPU that the size says."""
    share = float(size) if re.fullmatch(r"\d*\.\d+", size) else 0.0
    if kind == "cpu" or not _SMALLEST_SHARE <= share < 1:
        shares = "" if kind == "cpu" else f", or a share of one, from {_SMALLEST_SHARE:g} to less than 1"
        raise UserError(f"{field}={text!r}: expected how many, as in {kind}:8{shares}")
    return share


def _counted(text: str, kind: str, size: str, field: str, groups: int) -> RoleDevices:
    """Return this many devices, or `groups` of hosts that have as many."""
    if not size.isdecimal() or not int(size):
        raise UserError(f"{field}={text!r}: expected how many, as in {kind}:8")
    count = int(size)
    if groups > 1:
        text = f"{groups} x {text}"
    if kind == "cpu":
        return RoleDevices(text, tuple(PlaceholderDevice() for _ in range(groups * count)), 0, groups)
    if count > _GPUS_PER_HOST and count % _GPUS_PER_HOST:
        raise UserError(f"{field}={text!r}: expected up to {_GPUS_PER_HOST}, a host's, or a multiple of it")
    name, memory = _GPUS[kind]
    described = tuple(PlaceholderDevice("gpu", name) for _ in range(groups * count))
    hosts = groups * max(1, count // _GPUS_PER_HOST)
    model = None if kind == ANY_GPU else kind.upper()
    return RoleDevices(text, described, groups * count, hosts, memory, model=model)


_FULL = 1e-6  # rounding error of summed shares of a chip


def count_hosts(roles: Iterable[tuple[int, RoleDevices]]) -> int:
    """Return the least number of hosts for so many instances of each role, on the largest machines of their kind.

    The hosts of one instance differ, and those of a TPU slice with several hosts have room for nothing else. CPU roles
    take a host for each process, because nothing says how large that is.
    """
    whole, parts = 0, dict[str, list[tuple[float, int]]]()  # kind of device -> (chips of a host, hosts)
    for count, devices in roles:
        each = devices.share * devices.chips / devices.hosts
        if not devices.chips or devices.topology is not None and devices.hosts > devices.topology.slices:
            whole += count * devices.hosts
        else:
            kind = devices.described[0].device_kind
            parts.setdefault(f"{kind} {devices.host_chips}", []).extend([(each, devices.hosts)] * count)
    return whole + sum(_packed(several, float(kind.rpartition(" ")[2])) for kind, several in parts.items())


def _packed(instances: list[tuple[float, int]], room: float) -> int:
    left: list[float] = []
    for each, hosts in sorted(instances, reverse=True):
        fitting = [host for host, free in enumerate(left) if free >= each - _FULL][:hosts]
        for host in fitting:
            left[host] -= each
        left += [room - each] * (hosts - len(fitting))
    return len(left)
