"""Requests of the processes of a role to a scheduler: how many of which devices each has, and in which slice."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mesh import UserError
from mesh.generations import generation_of
from mesh.topology import Topology
from rl.fleet.devices import HERE, RoleDevices, gpu_text, parse_count, parse_devices
from rl.fleet.fleet import parse_worker
from rl.protocol.experiment import ExperimentConfig

MEMORY_FRACTION, OLD_MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
# Share of a GPU that jax may allocate in all processes that share it: the CUDA context of each process, and
# the libraries that it loads, are beside jax's own memory.
_SHARED_MEMORY = 0.9
_STEPS = 10_000  # Ray counts shares in steps of 1/10000


@dataclasses.dataclass(frozen=True)
class RoleRequest:
    """Devices of a role in the terms of a scheduler."""

    role: str
    instances: int  # number, each with devices of its own
    processes: int
    # "GPU" or "TPU", of which each process asks for `each`; "CPU": it may go anywhere
    kind: Literal["CPU", "GPU", "TPU"]
    each: float  # GPUs or chips of a process; less than 1: its share of one GPU
    devices: int  # devices of a process, as jax shows them; 0: as many as its machine has
    model: str | None = None  # model of the GPUs: "H100"; None: any
    topology: Topology | None = None

    @property
    def total(self) -> float:
        """GPUs or chips of all instances."""
        return self.instances * self.processes * self.each

    @property
    def slices(self) -> int:
        """TPU slices of an instance."""
        return 1 if self.topology is None else self.topology.slices

    @property
    def hosts_per_slice(self) -> int:
        """Hosts of a TPU slice, which belong together if there are several."""
        return self.processes // self.slices

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that let a process show its devices; `given` are those of the command.

        With JAX_PLATFORMS=cpu there, a process shows as many CPU devices instead: a rehearsal of the fleet.
        """
        variables: dict[str, str] = {}
        if self.kind == "CPU" or given.get("JAX_PLATFORMS") == "cpu":
            variables["JAX_PLATFORMS"] = "cpu"
            if self.devices:
                variables["JAX_NUM_CPU_DEVICES"] = str(self.devices)
        if self.kind == "GPU" and self.each < 1:
            whole = float(given.get(MEMORY_FRACTION) or given.get(OLD_MEMORY_FRACTION) or _SHARED_MEMORY)
            variables |= {MEMORY_FRACTION: f"{whole * self.each:.4f}", OLD_MEMORY_FRACTION: ""}  # never both
        return variables


def role_requests(cfg: ExperimentConfig, here: Sequence[Any]) -> dict[str, RoleRequest]:
    """Return the requests of `trainer`, `worker` and `reference`; a role without one uses what its machine shows.

    Args:
        here: the devices of this machine, described; empty: they are not known, because the roles go to a cluster.

    Raises:
        UserError: this machine's devices cannot be shared by the roles.
    """
    if cfg.fleet.here:
        found = _sharing(cfg.workers, here)
    else:
        slices, trainer = parse_count(cfg.fleet.trainer, "fleet.trainer")
        _, hosts, worker = parse_worker(cfg.fleet.workers)
        found = {
            "trainer": _request("trainer", 1, trainer, "fleet.trainer", slices, here),
            "worker": _request("worker", cfg.workers, worker, "fleet.workers", hosts, here),
        }
    for role in found.keys() & cfg.standby.keys():
        if cfg.fleet.here:
            raise UserError(
                f"standby={cfg.standby}: expected {{}} where all roles share {_words(here)} of this machine"
            )
        found[role] = dataclasses.replace(found[role], instances=found[role].instances + cfg.standby[role])
    if cfg.fleet.reference is not None:
        hosts, reference = parse_count(cfg.fleet.reference, "fleet.reference")
        found["reference"] = _request("reference", 1, reference, "fleet.reference", hosts, here)
        _refuse_shared(cfg, found["reference"], here)
    processes, given = cfg.trainer.processes, found.get("trainer")
    if given is not None and given.processes != processes:
        if given.devices:
            raise UserError(
                f"trainer.processes={processes}, and fleet.trainer={cfg.fleet.trainer} has one for each of its hosts; "
                f"expected {given.processes}"
            )
        found["trainer"] = dataclasses.replace(given, processes=processes)
    return {role: request for role, request in found.items() if request.instances}


def _request(role: str, instances: int, text: str, field: str, slices: int, here: Sequence[Any]) -> RoleRequest:
    if text != HERE:
        return _described(role, instances, parse_devices(text, field, slices))
    if here and here[0].platform != "cpu":
        raise UserError(
            f"{field}={HERE}: this machine has {_words(here)}, of which the other role may have some; describe the "
            f"devices of both, such as {suggested_fleet(here)}"
        )
    return RoleRequest(role, instances, 1, "CPU", 0, 0)  # accelerators where it starts belong to others


def _refuse_shared(cfg: ExperimentConfig, reference: RoleRequest, here: Sequence[Any]) -> None:
    """Refuse a reference on an accelerator beside roles that would take all of this machine's."""
    if cfg.fleet.here and reference.kind != "CPU" and here and here[0].platform != "cpu":
        raise UserError(
            f"fleet.reference={cfg.fleet.reference}: this machine has {_words(here)}, all of which trainer and workers "
            "share unless their devices are described, too; expected --fleet trainer=...,workers=...,reference=..."
        )


def _described(role: str, instances: int, devices: RoleDevices) -> RoleRequest:
    each, topology = float(devices.each_host), devices.topology
    if devices.platform == "cpu":
        return RoleRequest(role, instances, devices.hosts, "CPU", 0, devices.each_host)
    if topology is not None:
        chips = float(devices.chips // devices.hosts)
        return RoleRequest(role, instances, devices.hosts, "TPU", chips, devices.each_host, topology=topology)
    each = devices.share if devices.share < 1 else each
    return RoleRequest(role, instances, devices.hosts, "GPU", each, devices.each_host, devices.model)


def _sharing(workers: int, here: Sequence[Any]) -> dict[str, RoleRequest]:
    """Let all roles share the only GPU of this machine: half for the trainer, the other half for the workers."""
    if not here or here[0].platform not in ("gpu", "tpu"):
        return {}
    if here[0].platform == "tpu" or len(here) > 1:
        raise UserError(
            f"this machine has {_words(here)}, and trainer and workers, which are processes of their own, need "
            f"different ones; expected {suggested_fleet(here)}"
        )
    if not workers:
        return {"trainer": RoleRequest("trainer", 1, 1, "GPU", 1.0, 1)}
    each = math.floor(_STEPS / 2 / workers) / _STEPS
    return {
        "trainer": RoleRequest("trainer", 1, 1, "GPU", 0.5, 1),
        "worker": RoleRequest("worker", workers, 1, "GPU", each, 1),
    }


def suggested_fleet(here: Sequence[Any]) -> str:
    """Return options for a machine with these accelerators: the trainer has half of them, each worker one."""
    if here[0].platform == "gpu":
        kind, count = gpu_text(here), len(here)
        if count == 1:
            return f"--fleet trainer={kind}:0.5,workers=2x{kind}:0.25"
        trainer = 1 << ((count // 2).bit_length() - 1)  # power of two, by which batches divide
        return f"--fleet trainer={kind}:{trainer},workers={count - trainer}x{kind}:1"
    generation = generation_of(here[0])
    count = len(here) // (1 if generation is None else generation.devices)
    if generation is None or count == 1:
        return "--runtime inprocess, where one process has them all"
    flat = generation.largest_host == 8
    shapes = {1: "1x1", 4: "2x2"} if flat else {1: "1x1x1", 4: "2x2x1"}
    trainer = 4 if count == 8 else 1  # slices have one, four or eight chips
    name = generation.name
    return f"--fleet trainer={name}:{shapes[trainer]},workers={count - trainer}x{name}:{shapes[1]}"


def _words(here: Sequence[Any]) -> str:
    return f"{len(here)} x {here[0].device_kind}"
