"""The fleet of a run: on which devices trainer, workers and reference live, and what follows from that."""

import dataclasses
import math
from typing import Any, Self

from axlearn_like.checkpoint.interval import SAVE_EVERY
from axlearn_like.config import ConfigBase, Configurable, walk_configs, with_mesh_rules
from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.training.alignment.reference import FrozenCopy
from mesh import UserError
from mesh.distributed import is_loopback
from mesh.errors import did_you_mean, once
from rl.fleet.devices import HERE, RoleDevices, parse_count, parse_devices
from rl.protocol.experiment import ExperimentFields
from rl.rollout.config import engine_mesh

TRAINER = "trainer"  # workers that share the trainer's devices
_VERIFIERS = "cpu"  # devices of verifiers, which run no program of jax


class Fleet(Configurable):
    """Devices of the roles that compute; controller, parameter server and verifier use CPUs."""

    class Config(ConfigBase["Fleet"]):
        # Devices of the trainer: "v5p:8x8x8"; "2 x v5p:8x8x8": over two slices; "h100:8"; "h100:0.5": half of one;
        # "cpu:4"; here: this machine
        trainer: str = HERE
        # Devices of workers: "64 x v5p:2x2x2": 64 workers with such a slice each; "4 x 2 x h100:4": 4 over two hosts
        # each; here: this machine, shared; trainer: one in the trainer's process (--runtime inprocess).
        workers: str = HERE
        # Devices of the role that scores by trainer.reference: "v5p:2x2x1", "2 x h100:8", "cpu:2", here; None: no role
        reference: str | None = None
        allow_idle: bool = False  # True: roles may leave chips of theirs unused

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse a reference role that has nothing to score by, or whose weights could not be had again."""
            if self.reference is None:
                return
            trainer, reference = experiment.trainer, experiment.trainer.reference
            terms = "objective.regulariser=ReferenceKL.Config() or objective.reward_shaping=ReferencePenalty.Config()"
            why = "there is no reference policy"
            way = f"set trainer.reference=FrozenCopy.Config() and a term that compares with it ({terms})"
            self.require("reference", reference is not None, f"None, for {why}; or {way}")
            estimated = not experiment.objective.build().needs_exact_kl
            expected = (
                "None with ReferenceKL.Config(estimator='exact'), for which the trainer holds the reference's head"
            )
            self.require("reference", estimated, expected)
            whole = "FrozenCopy.Config(), WithoutAdapters.Config() or Teacher.Config()"
            why = "it is made of all versions, which the trainer alone sees"
            expected = f"None with trainer.reference={type(reference).__owner__.__name__}, for {why}; or {whole}"
            self.require("reference", reference.version_at(0) is not None, expected)
            every = reference.reset_every if isinstance(reference, FrozenCopy.Config) else None
            saved = every is None or every % (trainer.checkpoint.save_every or SAVE_EVERY) == 0
            expected = f"a divisor of trainer.reference.reset_every={every}, as fleet.reference reads those versions"
            trainer.checkpoint.require("save_every", saved, expected)

        @property
        def here(self) -> bool:
            """True if trainer and workers share this machine."""
            return self.trainer == HERE and self.workers in (HERE, TRAINER)

        @property
        def worker_hosts(self) -> int:
            """Hosts of a worker, with a process each."""
            if self.workers in (HERE, TRAINER):
                return 1
            _, hosts, text = parse_worker(self.workers)
            return 1 if text == HERE else parse_devices(text, "fleet.workers", hosts).hosts

        @property
        def reference_hosts(self) -> int:
            """Hosts of the reference role, with a process each; 0: there is none."""
            if self.reference in (None, HERE):
                return 0 if self.reference is None else 1
            return reference_devices(self.reference).hosts

        def edited(self, text: str) -> Self:
            """Return a copy changed by a text such as `trainer=v5p:8x8x8,workers=64xv5p:2x2x1,verifiers=cpu`.

            Raises:
                UserError: there is no such role, or it has no such devices.
            """
            changes: dict[str, str] = {}
            for part in text.split(","):
                role, equals, devices = (word.strip() for word in part.partition("="))
                if equals and role in ("trainer", "workers", "reference"):
                    changes = once("--fleet", (*changes.items(), (role, devices)))
                elif not (equals and role == "verifiers" and devices == _VERIFIERS):
                    raise UserError(f"--fleet {part!r}: {_refusal(role)}")
            return self.clone(**changes)

    def __init__(self, cfg: Config):
        slices, text = parse_count(cfg.trainer, "fleet.trainer")
        self.trainer: RoleDevices = parse_devices(text, "fleet.trainer", slices)
        number, hosts, text = parse_worker(cfg.workers)
        self.together = cfg.workers == TRAINER  # trainer and worker are one process
        shared = self.together or cfg.here
        self.worker: RoleDevices = self.trainer if shared else parse_devices(text, "fleet.workers", hosts)  # each
        self.reference = None if cfg.reference is None else reference_devices(cfg.reference)
        self.workers = None if cfg.workers == HERE else number  # None: as the experiment says
        if self.together and self.trainer.hosts > 1:
            hosts = f"{cfg.trainer} has {self.trainer.hosts}"
            raise UserError(
                f"fleet.workers='{TRAINER}': expected a trainer on one host, for it is one process; {hosts}"
            )


def _refusal(role: str) -> str:
    """Return why `--fleet` gives a role no devices, and what to write instead."""
    if role == "verifiers":
        return f"verifiers open no accelerator; expected verifiers={_VERIFIERS}, verifier.processes is their number"
    near = did_you_mean(role, ("trainer", "workers", "reference", "verifiers"))
    return f"expected trainer=DEVICES, workers=N x DEVICES, reference=DEVICES or verifiers={_VERIFIERS}{near}"


def reference_devices(text: str) -> RoleDevices:
    """Return the devices of the reference role by their text (UserError: there are no such devices)."""
    hosts, text = parse_count(text, "fleet.reference")
    return parse_devices(text, "fleet.reference", hosts)


def parse_worker(text: str) -> tuple[int, int, str]:
    """Split `4 x 2 x h100:4` into workers, hosts or slices of each, and devices of one (UserError: 0, or none)."""
    workers, each = parse_count(text, "fleet.workers")
    return workers, *parse_count(each, "fleet.workers")


@dataclasses.dataclass(frozen=True)
class Placed[C]:
    """An experiment on its fleet."""

    cfg: C
    fleet: Fleet


def place[C: ConfigBase[Any]](cfg: C) -> Placed[C]:
    """Apply mesh rules by the devices of each role, one process for each host of the trainer, the number of workers.

    Raises:
        UserError: there are no such devices, or no mesh rule for them.
    """
    given: Any = cfg
    fleet: Fleet = given.fleet.build()
    placed: Any = with_mesh_rules(cfg, fleet.trainer.name, within={"engine": fleet.worker.name})
    if fleet.trainer.hosts > 1:
        placed.trainer.processes = fleet.trainer.hosts
    if fleet.workers is not None:
        placed.workers = fleet.workers
    one_place = given.fleet.here or fleet.together or _fits_one_machine(fleet, placed.workers)
    if not one_place and is_loopback(placed.parameter_server.host):
        placed.parameter_server.host = "0.0.0.0"
    return Placed(placed, fleet)


def refuse_idle(placed: Placed[Any]) -> None:
    """Refuse a fleet some of whose chips no mesh uses, unless it is allowed (UserError: with a mesh that would)."""
    cfg, fleet = placed.cfg, placed.fleet
    meshes = {"trainer.mesh": (cfg.trainer.mesh, fleet.trainer)}
    if fleet.workers is not None and not fleet.together:  # others take turns on the trainer's
        meshes["engine.mesh"] = cfg.engine.mesh, fleet.worker
    for field, (mesh, devices) in meshes.items():
        used, there = math.prod(mesh.values()), len(devices.described)
        if used < 0 or used >= there or not devices.chips or cfg.fleet.allow_idle:
            continue
        raise UserError(
            f"{field}={mesh} uses {used} of the {there} devices of {devices.text}, which is paid for; expected "
            f"{_busy(field, cfg.policy, there)}, or --allow-idle (fleet.allow_idle=True)"
        )


def _busy(field: str, policy: ConfigBase[Any], devices: int) -> str:
    """Return a mesh that uses so many devices, in words."""
    if field == "trainer.mesh":
        return "trainer.mesh={'fsdp': -1}"
    heads = build_abstract(plain_config(policy)).cache_shape[0]
    experts = max((getattr(part, "num_experts", 0) for _, part in walk_configs(policy)), default=0)
    counts = [n for n in range(devices, 0, -1) if devices % n == 0]
    most, mesh = next((n, mesh) for n in counts if (mesh := engine_mesh(heads, experts, n)) is not None)
    said = f"engine.mesh={mesh}"
    each = "one device" if most == 1 else f"{most} devices"
    return said if most == devices else f"{devices // most} times as many workers of {each} each, with {said}"


def _fits_one_machine(fleet: Fleet, workers: int) -> bool:
    """Return True if a machine may have all devices; roles on several need more than its loopback address."""
    roles = [(fleet.trainer, 1), (fleet.worker, workers), *([] if fleet.reference is None else [(fleet.reference, 1)])]
    counted = [(one, number) for one, number in roles if one.chips and number]
    if len({one.described[0].device_kind for one, _ in counted}) > 1 or any(one.hosts > 1 for one, _ in counted):
        return False
    return all(sum(each.share * each.chips * n for each, n in counted) <= one.host_chips for one, _ in counted)
