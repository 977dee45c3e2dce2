"""The plan of a submission: the experiment on the devices of its target, before anything is asked for."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.operations.memory import bytes_of_device
from mesh import UserError
from rl.fleet.plan import RolePlan, plan_fleet
from tools.experiment import Chosen, apply_edits, check_command, choose, commands_of
from tools.fleet import on_fleet
from tools.launch.command import check_words, own_files
from tools.launch.kubernetes.names import check_pods
from tools.launch.launch import Launch, Machines
from tools.launch.machines.accelerators import Slices
from tools.launch.machines.capacity import SPOT_GRACE, Capacity

_GIB = 1 << 30
_HAND_BACK = SPOT_GRACE - 3  # seconds in which a role hands back its work; the rest is for its processes to end
_HEAD_MEMORY = 16  # GiB beside the weights that the parameter server keeps


@dataclasses.dataclass(frozen=True)
class Role:
    """Instances of a role, each submitted by itself."""

    name: str  # head, trainer, worker or reference; or command
    count: int  # instances
    capacity: Capacity  # terms under which its machines are asked for
    slices: Slices | None = None  # slices of one instance; None: one machine without accelerators
    mesh: dict[str, int] = dataclasses.field(default_factory=dict[str, int])  # axes that are not 1
    # Bytes of a device that it keeps all the time, by what they are for
    holds: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    device_memory: int = 0  # bytes of a device
    price: float | None = None  # price of a chip for an hour
    memory_gib: int = 0  # memory in GiB that a machine without accelerators must have

    @property
    def jobs(self) -> int:
        """Slices of an instance, or its machine."""
        return 1 if self.slices is None else self.slices.count

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
            "devices": None if self.slices is None else str(self.slices),
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
    """Plan of a submission."""

    name: str  # name of the run
    command: str  # command that runs the experiment: train or rl; or the first word of another command
    experiment: ConfigBase[Any] | None  # config on the target's devices, resolved; None: another command
    sets: tuple[str, ...]  # edits of the experiment, those that the target asks for last
    fleet: str | None  # fleet of an RL run, as --fleet takes it
    roles: tuple[Role, ...]  # head, trainer, worker, and reference if it has machines of its own
    refusals: tuple[str, ...]  # why the experiment cannot run there
    seconds: float  # seconds that it took to make the plan
    words: tuple[str, ...] = ()  # words of another command

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
    machines = cfg.machines()
    if cfg.experiment is None:
        plan = _plan_command(cfg, machines["command"])
    else:
        chosen = choose(cfg.experiment, cfg.sets, cfg.seed, cfg.applied)
        command = next(iter(commands_of(chosen.cfg)), "")
        if command not in ("train", "rl"):
            check_command(chosen.cfg, "launch", cfg.experiment)
        plan = (_plan_rl if command == "rl" else _plan_training)(cfg, chosen, machines)
    _check(cfg, plan)
    return dataclasses.replace(plan, seconds=time.monotonic() - began)


def refuse(plan: LaunchPlan) -> None:
    """Raise a UserError with the arithmetic if the experiment cannot run on its target."""
    if plan.refusals:
        raise UserError(
            f"{plan.name} cannot run on these devices, so nothing is written:\n  " + "\n  ".join(plan.refusals)
        )


def _plan_command(cfg: Launch.Config, machines: Machines) -> LaunchPlan:
    names, slices = check_words(cfg.command), machines.slices
    called = f"axl {' '.join(names)}"
    if cfg.bundle:
        list(own_files(cfg.command))  # all are there
    if slices is not None and slices.hosts > 1:
        raise UserError(f"{slices}: `{called}` is one process, and these devices have {slices.hosts} hosts")
    memory = cfg.kubernetes.command_memory
    role = Role("command", 1, machines.capacity, slices, price=machines.price, memory_gib=memory)
    return LaunchPlan(cfg.run_name, names[0], None, (), None, (role,), (), 0.0, cfg.command)


def _plan_training(cfg: Launch.Config, chosen: Chosen, machines: Mapping[str, Machines]) -> LaunchPlan:
    cfg.require("workers", cfg.workers == 0, f"0: {cfg.experiment} is no RL experiment")
    none = cfg.reference_devices is None
    cfg.require("reference_devices", none, f"None: {cfg.experiment} is no RL experiment")
    devices = _slices(machines["trainer"]).devices
    name = devices.name
    edited: Any = chosen.on(lambda: name)
    edited.check()
    mesh = edited.check_sizes(devices.described)
    state = edited.program(mesh).state
    parts = {"parameters": state["params"], "optimizer": state["opt_state"], "gradients": state["params"]}
    holds = {name: bytes_of_device(part) for name, part in parts.items()}
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    planned = RolePlan("trainer", 1, devices, devices.hosts, sizes, holds, {})
    role, short = _role(planned, machines["trainer"]), tuple(planned.shortages())
    return LaunchPlan(cfg.run_name, "train", edited.resolved(), cfg.sets, None, (role,), short, 0.0)


def _plan_rl(cfg: Launch.Config, chosen: Chosen, machines: Mapping[str, Machines]) -> LaunchPlan:
    cfg.require(
        "workers",
        "worker" in machines,
        "--workers N --worker-tpu KIND:SHAPE or --worker-gpu KIND:NUMBER for an RL experiment",
    )
    texts = {role: _slices(one).text for role, one in machines.items() if role != "head"}
    asked = texts.get("reference")
    fleet = f"trainer={'' if cfg.slices == 1 else f'{cfg.slices} x '}{texts['trainer']}"
    fleet += f",workers={cfg.workers} x {texts['worker']}" + ("" if asked is None else f",reference={asked}")
    placed = on_fleet(chosen, fleet)
    expected = "None, and --reference-tpu KIND:SHAPE or --reference-gpu KIND:NUMBER, which asks for its machines"
    expected = expected if asked is None else f"{asked}, as the submission asks for"
    placed.cfg.fleet.require("reference", placed.cfg.fleet.reference == asked, expected)
    # A role hands back in the time that spot machines have.
    late = any(one.capacity.spot for one in machines.values()) and placed.cfg.timeouts.grace > _HAND_BACK
    more = (f"timeouts.grace={_HAND_BACK}",) if late else ()
    apply_edits(placed.cfg, more)
    planned = plan_fleet(placed, compile_programs=False)
    kept = placed.cfg.parameter_server.keep * (planned.push + planned.frozen)
    refusals, sets = tuple(planned.refusals), (*cfg.sets, *more)
    head = Role("head", 1, machines["head"].capacity, memory_gib=_HEAD_MEMORY + math.ceil(kept / _GIB))
    roles = (head, *(_role(role, machines[role.role]) for role in planned.roles))
    return LaunchPlan(cfg.run_name, "rl", placed.cfg.resolved(), sets, fleet, roles, refusals, 0.0)


def _role(planned: RolePlan, machines: Machines) -> Role:
    return Role(
        planned.role,
        planned.count,
        machines.capacity,
        machines.slices,
        planned.mesh,
        planned.holds,
        planned.devices.memory or 0,
        machines.price,
    )


def _slices(machines: Machines) -> Slices:
    assert machines.slices is not None, "of a role that computes"
    return machines.slices


def _check(cfg: Launch.Config, plan: LaunchPlan) -> None:
    """Refuse names that are too long, and slices without the policy or the JobSet that they need."""
    for role in plan.roles:
        named = role.slices is None or role.slices.accelerator.label != "" or cfg.on != "gke"
        cfg.require("devices", named, "GPUs of a model with --on gke, such as h100:8")
        last = f"{plan.name}-{role.name}" + (f"-{role.count - 1}" if role.name == "worker" else "")
        check_pods(plan.name, last, role.jobs, role.pods)
        if role.slices is not None and role.pods > 1 and role.slices.accelerator.placement:
            name = role.slices.topology.name
            fits = name in cfg.kubernetes.placement_policies
            cfg.kubernetes.require("placement_policies", fits, f"the name of the workload policy for {name}")
