"""The plan of a submission: the experiment on the devices of its target, before anything is asked for."""

import dataclasses
import math
import time
from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.operations.memory import bytes_of_device
from mesh import UserError
from rl.fleet.devices import RoleDevices, parse_devices
from rl.fleet.fleet import Fleet
from rl.fleet.plan import FleetPlan, RolePlan, plan_fleet
from tools.experiment import check_command, commands_of, load_experiment
from tools.fleet import load_placed
from tools.launch.command import check_words, own_files
from tools.launch.launch import STATELESS, Launch
from tools.launch.machines.accelerators import Slices
from tools.launch.machines.capacity import SPOT_GRACE, Capacity
from tools.launch.names import check_pods

_GIB = 1 << 30
_HAND_BACK = SPOT_GRACE - 3  # seconds in which a role hands back its work; the rest is for its processes to end
_HEAD_MEMORY = 16  # GiB beside the weights that the parameter server keeps


@dataclasses.dataclass(frozen=True)
class Role:
    """Instances of a role, each submitted by itself.

    Attributes:
        name: head, trainer, worker or reference; or command.
        count: instances.
        capacity: terms under which its machines are asked for.
        slices: slices of one instance; None: one machine without accelerators.
        mesh: axes that are not 1.
        holds: bytes of a device that it keeps all the time, by what they are for.
        device_memory: bytes of a device.
        price: price of a chip for an hour.
        memory_gib: memory in GiB that a machine without accelerators must have.
    """

    name: str
    count: int
    capacity: Capacity
    slices: Slices | None = None
    mesh: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    holds: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    device_memory: int = 0
    price: float | None = None
    memory_gib: int = 0

    @property
    def jobs(self) -> int:
        """Slices of an instance, or its machine."""
        return 1 if self.slices is None else self.slices.topology.slices

    @property
    def pods(self) -> int:
        """Machines of a slice, with a process each."""
        return 1 if self.slices is None else self.slices.hosts

    @property
    def chips(self) -> int:
        """Chips of all instances."""
        return 0 if self.slices is None else self.count * self.jobs * self.slices.chips

    @property
    def cost(self) -> float | None:
        """Price of all instances for an hour; None: not given."""
        return None if self.price is None else self.price * self.chips

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {
            "count": self.count,
            "devices": None if self.slices is None else str(self.slices.topology),
            "machine_type": None if self.slices is None else self.slices.machine_type,
            "capacity": self.capacity.kind,
            "hosts": self.count * self.jobs * self.pods,
            "chips": self.chips,
            "processes": self.count * self.jobs * self.pods,
            "mesh": self.mesh,
            "holds": self.holds,
            "device_memory": self.device_memory,
            "cost_per_hour": self.cost,
        }


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """Plan of a submission.

    Attributes:
        name: name of the run.
        command: command that runs the experiment: train or rl; or the first word of another command.
        experiment: its config on the target's devices, resolved; None: another command.
        sets: edits of the experiment, those that the target asks for last.
        fleet: fleet of an RL run, as --fleet takes it.
        roles: head, trainer, worker, and reference if it has machines of its own.
        refusals: why the experiment cannot run there.
        seconds: seconds that it took to make the plan.
        words: words of another command.
    """

    name: str
    command: str
    experiment: ConfigBase[Any] | None
    sets: tuple[str, ...]
    fleet: str | None
    roles: tuple[Role, ...]
    refusals: tuple[str, ...]
    seconds: float
    words: tuple[str, ...] = ()

    @property
    def cost(self) -> float | None:
        """Price of all chips for an hour; None: not given."""
        prices = [role.cost for role in self.roles if role.slices is not None]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        roles = {role.name: role.as_dict() for role in self.roles}
        totals = {key: sum(role[key] for role in roles.values()) for key in ("hosts", "chips", "processes")}
        return {
            "name": self.name,
            "command": self.command,
            **totals,
            "fits": not self.refusals,
            "refusals": list(self.refusals),
            "cost_per_hour": self.cost,
            "roles": roles,
            "plan_s": round(self.seconds, 3),
        }


def plan_launch(cfg: Launch.Config) -> LaunchPlan:
    """Plan a submission: mesh rules of the target, hosts, meshes, bytes that a device keeps.

    Raises:
        UserError: there is no such experiment or slice, or the mesh does not divide it.
    """
    began = time.monotonic()
    cfg.check()
    plan = _plan_command(cfg) if cfg.experiment is None else _plan_experiment(cfg, cfg.experiment)
    for role in plan.roles:
        last = f"{plan.name}-{role.name}" + (f"-{role.count - 1}" if role.name == "worker" else "")
        check_pods(plan.name, last, role.jobs, role.pods)
        _check_policy(cfg, role)
    whole = not cfg.kubernetes.one_jobset or (plan.command == "rl" and cfg.on in ("gke", "local"))
    cfg.kubernetes.require("one_jobset", whole, "False, or an RL experiment with --on gke")
    return dataclasses.replace(plan, seconds=time.monotonic() - began)


def refuse(plan: LaunchPlan) -> None:
    """Raise a UserError with the arithmetic if the experiment cannot run on its target."""
    if plan.refusals:
        raise UserError(
            f"{plan.name} cannot run on these devices, so nothing is written:\n  " + "\n  ".join(plan.refusals)
        )


def _plan_experiment(cfg: Launch.Config, name: str) -> LaunchPlan:
    shown = load_experiment(name, (), cfg.seed)
    command = next(iter(commands_of(shown)), "")
    if command not in ("train", "rl"):
        check_command(shown, "launch", name)
    return _plan_rl(cfg, name) if command == "rl" else _plan_training(cfg, name)


def _plan_command(cfg: Launch.Config) -> LaunchPlan:
    """Plan a command: one process on one host, or on a machine without accelerators."""
    names, slices = check_words(cfg.command), cfg.own_slices()
    called = f"axl {' '.join(names)}"
    if cfg.bundle:
        list(own_files(cfg.command))  # all are there
    if slices is not None and slices.hosts > 1:
        raise UserError(f"--tpu {cfg.tpu}: `{called}` is one process, and this slice has {slices.hosts} hosts")
    memory = cfg.kubernetes.command_memory
    role = Role("command", 1, cfg.terms("command"), slices, price=cfg.price, memory_gib=memory)
    return LaunchPlan(cfg.run_name, names[0], None, (), None, (role,), (), 0.0, cfg.command)


def _plan_training(cfg: Launch.Config, name: str) -> LaunchPlan:
    cfg.require("workers", cfg.workers == 0, f"0: {name} is no RL experiment")
    cfg.require("reference_tpu", cfg.reference_tpu is None, f"None: {name} is no RL experiment")
    slices = cfg.trainer_slices()
    devices = _devices(slices, "--tpu")
    experiment: Any = load_experiment(name, cfg.sets, cfg.seed, lambda: devices.name, cfg.applied)
    experiment.check()
    mesh = experiment.check_sizes(devices.described)
    state = experiment.program(mesh).state
    holds = {
        name: bytes_of_device(state[part]) for name, part in (("parameters", "params"), ("optimizer", "opt_state"))
    }
    holds["gradients"] = holds["parameters"]
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    memory = devices.memory or 0
    shown = RolePlan("trainer", 1, devices, slices.topology.hosts, sizes, holds, {})
    role = Role("trainer", 1, cfg.terms("trainer"), slices, sizes, holds, memory, cfg.price_of("trainer"))
    resolved = experiment.resolved()
    return LaunchPlan(cfg.run_name, "train", resolved, cfg.sets, None, (role,), tuple(shown.shortages()), 0.0)


def _plan_rl(cfg: Launch.Config, name: str) -> LaunchPlan:
    worker = cfg.worker_slices()
    cfg.require("workers", worker is not None, "--workers N --worker-tpu KIND:SHAPE for an RL experiment")
    assert worker is not None
    fleet, reference = _fleet(cfg, worker), cfg.reference_slices()
    placed = load_placed(name, cfg.sets, cfg.seed, cfg.applied, fleet)
    _check_reference(placed.cfg.fleet, reference)
    more = _edits(cfg, placed.cfg)
    if more:
        placed = load_placed(name, (*cfg.sets, *more), cfg.seed, cfg.applied, fleet)
    planned = plan_fleet(placed, compile_programs=False)
    roles = (
        Role("head", 1, cfg.terms("head"), memory_gib=_head_memory(planned, placed.cfg)),
        _role(cfg, planned.trainer, cfg.trainer_slices()),
        _role(cfg, planned.worker, worker),
        *([] if reference is None or planned.reference is None else [_role(cfg, planned.reference, reference)]),
    )
    sets = (*cfg.sets, *more)
    return LaunchPlan(cfg.run_name, "rl", placed.cfg.resolved(), sets, fleet, roles, tuple(planned.refusals), 0.0)


def _fleet(cfg: Launch.Config, worker: Slices) -> str:
    """Return the fleet of an RL run, as --fleet takes it."""
    reference = cfg.reference_slices()
    roles = [f"trainer={_counted(cfg.slices, cfg.trainer_slices())}", f"workers={cfg.workers} x {worker.topology.text}"]
    return ",".join([*roles, *([] if reference is None else [f"reference={reference.topology.text}"])])


def _check_reference(fleet: Fleet.Config, slices: Slices | None) -> None:
    """Refuse a reference role with other devices than the machines that are asked for (UserError)."""
    asked = None if slices is None else slices.topology.text
    expected = "None, and --reference-tpu KIND:SHAPE, which asks for its machines"
    fleet.require("reference", fleet.reference == asked, expected if asked is None else f"{asked}, as --reference-tpu")


def _role(cfg: Launch.Config, planned: RolePlan, slices: Slices) -> Role:
    return Role(
        planned.role,
        planned.count,
        cfg.terms(planned.role),
        slices,
        planned.mesh,
        planned.holds,
        planned.devices.memory or 0,
        cfg.price_of(planned.role),
    )


def _edits(cfg: Launch.Config, experiment: Any) -> tuple[str, ...]:
    """Return the edits that the target asks for: a role hands back in the time that spot machines have."""
    spot = any(cfg.terms(role).spot for role in ("trainer", *STATELESS))
    return (f"timeouts.grace={_HAND_BACK}",) if spot and experiment.timeouts.grace > _HAND_BACK else ()


def _head_memory(planned: FleetPlan, experiment: Any) -> int:
    """Return the GiB of the machine where the parameter server keeps its versions."""
    return _HEAD_MEMORY + math.ceil(experiment.parameter_server.keep * (planned.push + planned.frozen) / _GIB)


def _counted(slices: int, found: Slices) -> str:
    return found.topology.text if slices == 1 else f"{slices} x {found.topology.text}"


def _devices(slices: Slices, field: str) -> RoleDevices:
    return parse_devices(slices.topology.text, field, slices.topology.slices)


def _check_policy(cfg: Launch.Config, role: Role) -> None:
    """Refuse slices of several hosts without the workload policy that their generation needs on GKE."""
    if role.slices is None or role.pods == 1 or not role.slices.accelerator.placement:
        return
    name = role.slices.topology.name
    fits = name in cfg.kubernetes.placement_policies
    cfg.kubernetes.require("placement_policies", fits, f"the name of the workload policy for {name}")
