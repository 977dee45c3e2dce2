"""The plan of a fleet: hosts, processes, meshes, memory of each role, bytes of a push and a pull."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from axlearn_like.layers.parameter_names import only, path_name, without
from axlearn_like.operations.memory import bytes_of_device
from axlearn_like.run.clock import REAL
from axlearn_like.training.alignment.reference import Reference
from axlearn_like.training.program import describe_state
from axlearn_like.training.step import State
from mesh import UserError, make_mesh
from mesh.rules import use_rules
from rl.fleet.devices import HERE, RoleDevices, count_hosts
from rl.fleet.fleet import Placed
from rl.fleet.memory import ProgramMemory, program_memory
from rl.parameter_server.push.rounded_copies import rounded_dtypes
from rl.protocol.experiment import ExperimentConfig
from rl.rollout.model_runner.runner import ModelRunner
from rl.rollout.model_runner.weights import types_read
from rl.training.critic import Critic
from rl.training.scoring.reference_programs import describe_reference, reference_programs
from rl.training.trainer import PolicyTrainer

NEXT_WEIGHTS = "the next version's weights"  # a worker pulls them while it draws with the ones in place
ROUNDED = "rounded weights"  # weights of the version under way, on devices until the next update
_GRADIENTS = "gradients"


@dataclasses.dataclass(frozen=True)
class RolePlan:
    """One role on its devices."""

    role: str
    count: int  # instances, each with devices of its own unless they share this machine
    devices: RoleDevices
    processes: int
    mesh: dict[str, int]  # axes that are not 1
    holds: dict[str, int]  # bytes of a device that it keeps all the time, by what they are for
    programs: dict[str, ProgramMemory]  # name -> memory by the compiler; empty where nothing was compiled
    # Program -> bytes of a device held while it runs that are none of its arguments, by what they are
    beside: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict[str, dict[str, int]])
    standby: int = 0  # further instances, which wait to take over

    @property
    def instances(self) -> int:
        """All instances, those that wait included."""
        return self.count + self.standby

    def needed(self, name: str) -> int:
        """Return the bytes in use on a device while a program runs."""
        return self.programs[name].needed + sum(self.beside.get(name, {}).values())

    def shortages(self) -> list[str]:
        """Describe what does not fit, with the arithmetic."""
        found: list[str] = []
        memory, needed = self.devices.memory, sum(self.holds.values())
        if memory is not None and needed > memory:
            found.append(self._shortage("what it holds", needed, memory, self.holds) + self._instead(needed - memory))
        for name, program in self.programs.items():
            needed = self.needed(name)
            if program.refusal is None and needed <= program.available:
                continue
            parts = {"arguments": program.arguments, "the rest": program.beside, **self.beside.get(name, {})}
            said = "" if program.refusal is None else f" (the compiler: {program.refusal})"
            found.append(self._shortage(f"program {name}", needed, program.available, parts) + said)
        return found

    def _instead(self, missing: int) -> str:
        """Return what would fit, of an engine that holds the version in use and the next one."""
        weights = self.holds.get("weights", 0) * (NEXT_WEIGHTS in self.holds)
        if 0 < missing <= weights:  # half of them, twice
            said = f"--apply int8_rollouts takes about {_gib(weights)} less"
            return f"; two versions are held, for none is installed in place: {said}, or take more devices"
        return "; take fewer sequences (engine.max_num_seqs) or pages" if missing <= self.holds.get("pages", 0) else ""

    def _shortage(self, what: str, needed: int, available: int, parts: dict[str, int]) -> str:
        listed = " + ".join(f"{name} {_gib(size)}" for name, size in parts.items())
        each = f"a device of {self.devices.text} has {_gib(available)}"
        return f"{self.role}: {what} needs {listed} = {_gib(needed)}, and {each}"

    def impossible(self) -> list[str]:
        """Describe what the code cannot start."""
        used, there = math.prod(self.mesh.values()), len(self.devices.described)
        if self.role == "trainer" or self.devices.hosts == 1 or used == there:
            return []
        field = "engine.mesh" if self.role == "worker" else "trainer.reference_mesh"
        return [
            f"{self.role}: {self.devices.text} is {self.devices.hosts} hosts of {self.devices.each_host} devices, and "
            f"{field} has {used} of them, so that a process would have none or a part; expected all, such as "
            f"{field}={{'tensor': {there}}}"
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        programs = {
            name: {**dataclasses.asdict(m), "held_beside": self.beside.get(name, {}), "needed": self.needed(name)}
            for name, m in self.programs.items()
        }
        return {
            "count": self.count,
            **({"standby": self.standby} if self.standby else {}),
            "devices": self.devices.text,
            "chips": self.devices.chips,
            "hosts": self.devices.hosts,
            "processes": self.processes,
            "devices_per_process": len(self.devices.described) // self.processes,
            "mesh": self.mesh,
            "holds": self.holds,
            "memory": programs,
        }


@dataclasses.dataclass(frozen=True)
class FleetPlan:
    """All roles, and the weights that travel between them."""

    trainer: RolePlan
    worker: RolePlan
    push: int  # bytes of a version as the trainer publishes it; of the first, the `frozen` ones too
    pull: int  # bytes of a version that each worker fetches, uncompressed; of the first, the `frozen` ones too
    pull_per_host: int  # bytes of it that each of a worker's hosts fetches, for its own devices
    frozen: int  # bytes of parameters that no update changes
    seconds: float  # seconds that it took to make the plan
    together: bool = False  # worker and trainer are one process on the same devices
    reference: RolePlan | None = None  # the role that scores by a reference policy, if that has devices of its own
    loaded: int = 0  # bytes of weights that it reads when it starts, from the run's version 0 or a teacher's files

    @property
    def roles(self) -> list[RolePlan]:
        """All roles that compute."""
        return [self.trainer, self.worker, *([] if self.reference is None else [self.reference])]

    @property
    def refusals(self) -> list[str]:
        """Why this fleet cannot run the experiment; empty if it can."""
        return [line for role in self.roles for line in (*role.impossible(), *role.shortages())]

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data; bytes and counts."""
        shared = self.together or self.trainer.devices.text == self.worker.devices.text == HERE
        own = [role for role in self.roles if not (shared and role is self.worker)]
        each = [(1 if shared and role is self.trainer else role.instances, role.devices) for role in own]
        return {
            "hosts": count_hosts(each),
            "chips": _whole(n * one.share * one.chips for n, one in each),
            "processes": sum(role.instances * role.processes for role in (own if self.together else self.roles)),
            "fits": not any(role.shortages() for role in self.roles),
            "startable": not self.refusals,
            "refusals": self.refusals,
            "roles": {role.role: role.as_dict() for role in self.roles},
            "bytes": {
                "push": self.push,
                "push_per_host": self.push // self.trainer.devices.hosts,
                "pull": self.pull,
                "pull_per_host": self.pull_per_host,
                "pulls_of_all_workers": self.pull_per_host * self.worker.devices.hosts * self.worker.count,
                "frozen": self.frozen,
                **({} if self.reference is None else {"reference": self.loaded}),
            },
            "seconds": round(self.seconds, 2),
        }


def plan_fleet(placed: Placed[ExperimentConfig], *, compile_programs: bool = True) -> FleetPlan:
    """Plan an experiment on its fleet, by compiled TPU programs if allowed (UserError: names what does not fit)."""
    began = REAL()
    cfg, fleet, experiment = placed.cfg, placed.fleet, placed.cfg.build()
    for part in (cfg.parameter_server, cfg.alarms):  # configs that the plan does not build
        part.check()
    experiment.trainer_cfg.check(fleet.trainer.described)
    mesh = make_mesh(cfg.engine.mesh, fleet.worker.described)
    runner = ModelRunner(experiment.engine_cfg, fleet.worker.described[: mesh.size])
    read = types_read(experiment.engine_cfg)
    trainer, params, frozen = _plan_trainer(placed, experiment.trainer_cfg, read, compile_programs)
    draws = {"weights": bytes_of_device(runner.params), "pages": bytes_of_device(runner.cache.pool)}
    with jax.set_mesh(runner.mesh):
        windows = runner.cache.windows(runner.buckets.rows(runner.cfg.max_num_seqs), tiled=bool(runner.cfg.cascade))
    if windows:
        draws["windows of decoding"] = bytes_of_device(windows)
    following = {NEXT_WEIGHTS: draws["weights"]}
    if fleet.together:  # the engine sleeps while the trainer updates, not the other way round
        following |= {name: held for name, held in trainer.holds.items() if name != _GRADIENTS}
    names = ("prefill", "decode")
    worker = RolePlan(
        "worker",
        cfg.workers,
        fleet.worker,
        fleet.worker.hosts,
        _sizes(mesh),
        {**draws, **following},
        _programs(cfg, fleet.worker, mesh.size, names) if compile_programs else {},
        dict.fromkeys(names, following),
        standby=cfg.standby.get("worker", 0),
    )
    reference = _plan_reference(placed, experiment.trainer_cfg, compile_programs)
    pulled = without(runner.weights_like, frozen)
    pushed = _as_published(params, read)
    return FleetPlan(
        trainer=trainer,
        worker=worker,
        push=_bytes(without(pushed, frozen)),
        pull=_bytes(pulled),
        pull_per_host=_bytes_of(mesh.devices.flat[: fleet.worker.each_host], pulled),
        frozen=_bytes(only(pushed, frozen)),
        seconds=REAL() - began,
        together=fleet.together,
        reference=None if reference is None else reference[0],
        loaded=0 if reference is None else reference[1],
    )


def _plan_trainer(
    placed: Placed[ExperimentConfig],
    trainer_cfg: PolicyTrainer.Config,
    types: Callable[[str, np.dtype], np.dtype],
    compile_programs: bool,
) -> tuple[RolePlan, Any, Collection[str]]:
    """Return the trainer's plan, described parameters, and names of frozen ones; `types`: those that engines read."""
    cfg, devices = placed.cfg, placed.fleet.trainer
    compiled = compile_programs and devices.topology is not None
    # Placeholders have no memory of a host, to which a learner may move its state.
    mesh = make_mesh(
        cfg.trainer.mesh, devices.compilable() if compiled else devices.described, slices=cfg.trainer.slices
    )
    state = trainer_cfg.program(mesh).state
    frozen = trainer_cfg.learner.build().frozen(state["params"])
    own = {name: part for name, part in state.items() if name != "critic"}
    holds = {"parameters and optimizer": bytes_of_device(own)}
    policy, packed = {"policy and optimizer": holds["parameters and optimizer"]}, cfg.trainer.packing is not None
    held = cfg.trainer.reference if placed.fleet.reference is None else None
    policy |= (reference := _reference(held, frozen, state["params"]))
    critic, critic_optimizer = _critic(trainer_cfg, state)
    if not compiled:  # else the programs tell
        holds[_GRADIENTS] = bytes_of_device(trainer_cfg.build_learner().trained(state))
    holds |= reference | critic
    # Gradients of packed rows are summed, and rollouts scored, by programs that read the parameters alone.
    optimizer = {"optimizer": bytes_of_device(state["opt_state"])}
    shared = "critic" in state  # a head, which the programs of the policy's update take with its state
    others, read = (reference, optimizer | critic_optimizer) if shared else (reference | critic, optimizer)
    beside = {"score": optimizer | reference | critic, "train": (read if packed else {}) | others, "update": others}
    beside |= {"critic": policy, "values": (read | reference) if shared else policy | critic_optimizer}
    # Scoring before the advantages are known runs beside the copy of the last version. Others wait for that.
    rounded = _rounded(without(state["params"], frozen), types)
    beside["values"] = beside["values"] | rounded
    if trainer_cfg.build_objective().needs_divergence:
        beside["score"] = beside["score"] | rounded
    names = ("train", "update", "score") if packed else ("train", "score")
    names += trainer_cfg.critic_programs
    plan = RolePlan(
        "trainer",
        1,
        devices,
        cfg.trainer.processes,
        _sizes(mesh),
        holds,
        _programs(cfg, devices, mesh.size, names) if compile_programs else {},
        {name: beside[name] for name in names},
        standby=cfg.standby.get("trainer", 0),
    )
    return plan, state["params"], frozen


def _plan_reference(
    placed: Placed[ExperimentConfig], cfg: PolicyTrainer.Config, compile_programs: bool
) -> tuple[RolePlan, int] | None:
    """Return the plan of the reference role and the bytes of its weights; None: it has no devices of its own."""
    devices = placed.fleet.reference
    if devices is None:
        return None
    described = describe_reference(cfg, cfg.check_reference(devices.described))
    names = reference_programs(cfg.build_objective())
    plan = RolePlan(
        "reference",
        1,
        devices,
        devices.hosts,
        _sizes(described.mesh),
        {"weights": bytes_of_device(described.params)},
        _programs(placed.cfg, devices, described.mesh.size, names) if compile_programs else {},
    )
    return plan, _bytes(described.params)


def _programs(
    cfg: ExperimentConfig, devices: RoleDevices, count: int, names: tuple[str, ...]
) -> dict[str, ProgramMemory]:
    """Return the memory of these programs on a role's devices by the TPU compiler; empty for other devices."""
    if devices.topology is None:
        return {}
    known = cfg.programs(devices.compilable()[:count])
    return {name: program_memory(known[name](), devices.topology) for name in names}


def _reference(cfg: Reference.Config | None, frozen: Collection[str], params: Any) -> dict[str, int]:
    """Return the bytes of a device for what a reference policy holds beside the policy, if it does."""
    held = {} if cfg is None else cfg.build(frozen=frozen).memory(params)
    return {"reference policy": bytes_of_device(held)} if held else {}


def _critic(cfg: PolicyTrainer.Config, state: State) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of a device for the state of a critic, and for its optimizer alone, if there is one.

    `state`: the policy's described train state, which holds that of a critic on its trunk.
    """
    if cfg.critic is None:
        return {}, {}
    own = state.get("critic")
    if isinstance(cfg.critic, Critic.Config):
        mesh = jax.tree.leaves(state["params"])[0].sharding.mesh
        with use_rules(cfg.axis_rules), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            own = describe_state(cfg.critic.of_policy(cfg.model), cfg.critic.learner.build(), mesh)[1]
    assert own is not None, "in the state of the joint learner"
    return {"critic": bytes_of_device(own)}, {"critic's optimizer": bytes_of_device(own["opt_state"])}


def refuse(plan: FleetPlan) -> None:
    """Raise a UserError with the arithmetic if the fleet cannot run the experiment."""
    if plan.refusals:
        raise UserError("this fleet cannot run the experiment:\n  " + "\n  ".join(plan.refusals))


def _whole(shares: Iterable[float]) -> int:
    """Return the sum, rounded up: a device of which some is used is a device."""
    return math.ceil(round(sum(shares), 6))


def _sizes(mesh: Mesh) -> dict[str, int]:
    return {name: size for name, size in mesh.shape.items() if size > 1}


def _as_published(params: Any, read: Callable[[str, np.dtype], np.dtype]) -> Any:
    """Return descriptions of the parameters in the types in which the trainer publishes them."""
    rounded = rounded_dtypes(params, read)
    describe = lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, rounded.get(path_name(path), leaf.dtype))  # noqa: E731
    return jax.tree_util.tree_map_with_path(describe, params)


def _rounded(params: Any, read: Callable[[str, np.dtype], np.dtype]) -> dict[str, int]:
    """Return the bytes of a device for the parameters that it rounds to be published, if there are any."""
    types = rounded_dtypes(params, read)
    rounded = [
        jax.ShapeDtypeStruct(leaf.shape, types[name], sharding=leaf.sharding)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if (name := path_name(path)) in types
    ]
    return {ROUNDED: bytes_of_device(rounded)} if rounded else {}


def _bytes(described: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(described))


def _bytes_of(devices: Iterable[Any], described: Any) -> int:
    """Return the bytes of the slices that these devices hold, each counted once."""
    found, here = 0, set(devices)
    for leaf in jax.tree.leaves(described):
        slices = leaf.sharding.devices_indices_map(leaf.shape)
        kept = {str(index) for device, index in slices.items() if device in here}
        found += len(kept) * math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return found


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
