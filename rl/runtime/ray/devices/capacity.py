"""Room for a fleet in a Ray cluster, by the resources and labels of its nodes: a refusal before anything starts."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.tpu import get_num_tpu_slices

from mesh import UserError
from mesh.generations import GENERATIONS
from mesh.topology import Topology
from rl.fleet.requests import RoleRequest
from rl.runtime.cluster_file import NODES_VARIABLE

# Labels that Ray gives to nodes, from what Google's machines say of themselves.
POD_TYPE, SLICE, SHAPE = "ray.io/tpu-pod-type", "ray.io/tpu-slice-name", "ray.io/tpu-topology"
WORKER_ID = "ray.io/tpu-worker-id"
_SINGLE_HOST = (1, 4, 8)  # chips of slices with one host

# Labels that a launched run gives to its nodes: whose they are, and which of them, also after a machine was replaced.
ROLE, NAME = "axl-role", "axl-name"
_POLL = 0.1  # seconds
_WARN_EVERY = 60.0

Node = Mapping[str, Any]


def role_selector(role: str) -> dict[str, str]:
    """Return the label of the machines that are a role's own; empty in a cluster whose machines are anybody's.

    Without it a trainer could start on a spot machine that was asked for as a worker's.
    """
    return {ROLE: role} if any(ROLE in node["Labels"] for node in ray.nodes()) else {}


def own_machine(request: RoleRequest, instance: int, nodes: Sequence[Node]) -> dict[str, str]:
    """Return the label of the machines of an instance; empty where there are more or fewer of them than instances.

    A placement group that has lost its node is scheduled again without a pause as long as another node would do that
    is taken, which keeps a core of the head busy (Ray 2.60) until the machine is replaced, in hours perhaps. With its
    machine's name no other would do, and it waits.
    """
    alive = [node["Labels"] for node in nodes if node["Alive"]]
    names = sorted({labels[NAME] for labels in alive if NAME in labels and labels.get(ROLE) == request.role})
    return {NAME: names[instance]} if len(names) == request.instances else {}


def wait_for_nodes(stop: Callable[[], bool], check: Callable[[], None], say: Callable[[str], None]) -> None:
    """Wait for as many nodes as the environment says, which may take hours; `check` raises if Ray has died."""
    text = os.environ.get(NODES_VARIABLE, "0")
    needed, said = int(text) if text.isdecimal() else 0, 0.0
    while needed and not stop():
        there = sum(bool(node["Alive"]) for node in ray.nodes())
        if there >= needed:
            return
        check()
        if time.monotonic() - said > _WARN_EVERY:
            said = time.monotonic()
            say(f"waiting for machines: {there} of {needed} have joined")
        time.sleep(_POLL)


def accelerator_resource(request: RoleRequest) -> str | None:
    """Return the resource by which Ray tells GPUs of one model from others; None: any will do."""
    return None if request.model is None else f"accelerator_type:{request.model}"


def ray_generation(topology: Topology) -> str:
    """Return the name of a TPU generation in Ray."""
    return _ray_name(topology.generation.name)


def _ray_name(generation: str) -> str:
    return {"v5e": "v5litepod", "tpu7x": "v7x"}.get(generation, generation)


def pod_types(request: RoleRequest) -> list[str]:
    """Return the slices of one host in which a process of this request finds room, as Ray names them."""
    assert request.topology is not None
    chips, generation = int(request.each), request.topology.generation
    parts = [count for count in _SINGLE_HOST if chips <= count <= generation.largest_host]
    sizes = parts if request.slices == 1 else [chips]  # one of several slices is no part of a host
    return [f"{ray_generation(request.topology)}-{count * generation.counted}" for count in sizes]


def machine_selector(request: RoleRequest) -> dict[str, str]:
    """Return the labels of machines with a single slice for a process.

    How machines of a described generation name it is not known: they are those that name none of the table.
    """
    assert request.topology is not None
    own = role_selector(request.role)
    if not request.topology.generation.described:
        return {**own, POD_TYPE: f"in({','.join(pod_types(request))})"}
    others = sorted({found for node in ray.nodes() if _is_known(found := node["Labels"].get(POD_TYPE, ""))})
    return {**own, POD_TYPE: f"!in({','.join(others)})"} if others else own


def described_slices(request: RoleRequest, nodes: Sequence[Node]) -> list[str]:
    """Return the slices of a described generation, of which Ray knows nothing, whose hosts are all there."""
    assert request.topology is not None
    hosts: dict[str, set[str]] = {}
    for node in nodes:
        labels = node["Labels"]
        shaped = labels.get(SHAPE) == request.topology.name.partition(":")[2]
        if node["Alive"] and shaped and SLICE in labels and _is_usable(node, request):
            hosts.setdefault(labels[SLICE], set()).add(labels.get(WORKER_ID, ""))
    wanted = {str(index) for index in range(request.hosts_per_slice)}
    return sorted(name for name, there in hosts.items() if there >= wanted)


def _is_usable(node: Node, request: RoleRequest) -> bool:
    """Return True for a machine of a described generation, with room for a process, that is no other role's own."""
    labels = node["Labels"]
    own = labels.get(ROLE, request.role) == request.role and not _is_known(labels.get(POD_TYPE, ""))
    return own and node["Resources"].get("TPU", 0.0) >= request.each


def _is_known(pod_type: str) -> bool:
    return pod_type.rpartition("-")[0] in {_ray_name(name) for name in GENERATIONS}


def check_capacity(requests: Iterable[RoleRequest], nodes: Sequence[Node]) -> None:
    """Check that the cluster has the devices of a fleet, free or not (UserError: with the arithmetic)."""
    alive = [node for node in nodes if node["Alive"]]
    asked: dict[tuple[str, str], list[RoleRequest]] = {}
    for request in requests:
        if request.kind != "CPU":
            asked.setdefault(_unit(request), []).append(request)
    for (unit, _), group in asked.items():
        if group[0].topology is not None and group[0].hosts_per_slice > 1:
            _check_slices(unit, group)
        else:
            _check_hosts(unit, group, alive)


def _unit(request: RoleRequest) -> tuple[str, str]:
    """Return what is counted, and a key: requests of one key compete for the same devices."""
    if request.topology is None:
        model = "" if request.model is None else f"{request.model} "
        return f"{model}GPUs", model
    if request.hosts_per_slice > 1:
        name = request.topology.name
        return f"slices {name}", name
    name = request.topology.generation.name
    return f"{name} chips", name


def _check_slices(unit: str, group: Sequence[RoleRequest]) -> None:
    topology = group[0].topology
    assert topology is not None
    shape, version = topology.name.partition(":")[2], ray_generation(topology)
    there = (
        get_num_tpu_slices(shape, f"TPU-{version.upper()}")
        if not topology.generation.described
        else len(described_slices(group[0], ray.nodes()))
    )
    needed = sum(request.instances * request.slices for request in group)
    if there < needed:
        raise UserError(f"the fleet needs {needed} {unit}: {_roles(group, slices=True)}; {_has(there)}")


def _check_hosts(unit: str, group: Sequence[RoleRequest], alive: Sequence[Node]) -> None:
    hosts = sorted((_devices_of(node, group) for node in alive), reverse=True)
    needed, there = sum(request.total for request in group), sum(hosts)
    if there < needed:
        raise UserError(f"the fleet needs {needed:g} {unit}: {_roles(group)}; {_has(there)}")
    for request in group:
        fitting = sum(count >= request.each for count in hosts)
        if fitting < request.processes:
            number = "a host" if request.processes == 1 else f"{request.processes} hosts"
            raise UserError(
                f"the fleet needs {number} with {request.each:g} {unit} for the {request.role}; {_has(fitting)} "
                f"(its hosts have {', '.join(f'{count:g}' for count in hosts if count)})"
            )


def _devices_of(node: Node, group: Sequence[RoleRequest]) -> float:
    """Return the GPUs or chips of a node that some of these requests can use."""
    resources, labels = node["Resources"], node["Labels"]
    topology = group[0].topology
    if topology is not None and topology.generation.described:
        return resources.get("TPU", 0.0) if any(_is_usable(node, request) for request in group) else 0.0
    if topology is not None:
        usable = {name for request in group for name in pod_types(request)}
        return resources.get("TPU", 0.0) if labels.get(POD_TYPE) in usable else 0.0
    model = accelerator_resource(group[0])
    return resources.get("GPU", 0.0) if model is None or model in resources else 0.0


def _roles(group: Sequence[RoleRequest], *, slices: bool = False) -> str:
    def one(request: RoleRequest) -> str:
        number = f"{request.instances} x " if request.role == "worker" else ""
        return f"{number}{request.role} {request.slices if slices else request.processes * request.each:g}"

    return ", ".join(one(request) for request in group)


def _has(count: float) -> str:
    return f"the Ray cluster has {count:g}"


def accelerators(nodes: Sequence[Node]) -> str:
    """Return the accelerators of a cluster in words; empty if it has none."""
    counts: dict[str, float] = {}
    for node in (node for node in nodes if node["Alive"]):
        models = [name.partition(":")[2] for name in node["Resources"] if name.startswith("accelerator_type:")]
        for kind in ("GPU", "TPU"):
            if count := node["Resources"].get(kind, 0.0):
                name = f"{kind}s" if not models else f"{models[0]} {kind}s" if kind == "GPU" else f"{models[0]} chips"
                counts[name] = counts.get(name, 0.0) + count
    return ", ".join(f"{count:g} {name}" for name, count in sorted(counts.items()))
