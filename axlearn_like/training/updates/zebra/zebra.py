"""The config of zebra parallelism, what it fits, and the program of its step."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, override

import jax
from jax.sharding import Mesh

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, resolve
from axlearn_like.layers.base import Params, build_abstract, first_params
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.moe.experts import BiasedExperts, Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.parameter_names import merged, only, path_name, without
from axlearn_like.learner import SGD, AdamW, Learner, Lion
from axlearn_like.training.losses import SupervisedLoss
from axlearn_like.training.program import TrainProgram, check_rows, describe_state, drops_out
from axlearn_like.training.updates.zebra.lane import ExpertLane
from axlearn_like.training.updates.zebra.split import EXPERTS, ExpertSplit
from axlearn_like.training.updates.zebra.stages import AttentionStages, ExpertStages
from axlearn_like.training.updates.zebra.step import ZebraStep
from mesh import make_mesh
from mesh.cost.zebra import SideTimes, ZebraPlan, plan_zebra
from mesh.rules import use_mesh

_MICROBATCHES = 4  # default, without times


class ZebraTimes(Configurable):
    """Measured times of a layer's forward pass over a whole batch, from which the plan follows."""

    class Config(ConfigBase["ZebraTimes"]):
        attention_s: float = REQUIRED  # all but the experts, on attention's devices
        experts_s: float = REQUIRED  # all experts on experts' devices
        own_s: float = REQUIRED  # all experts on attention's devices
        bandwidth: float = REQUIRED  # bytes/s between the groups, in each direction
        loss_s: float = 0.0  # the loss and its backward pass, on attention's devices
        start_s: float = 0.0  # seconds that a program takes longer, however few its rows
        most: int | None = None  # experts of all layers that attention's devices have memory for; None: no limit

        @override
        def check_fields(self) -> None:
            for field in ("attention_s", "experts_s", "own_s", "bandwidth"):
                self.require(field, getattr(self, field) > 0, "above 0")
            self.require_least(0, "loss_s", "start_s", "most")

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def plan(self, sent: float, layers: int, num_experts: int, choices: Sequence[int], chunk: int) -> ZebraPlan:
        """Return the plan where a layer sends so many bytes in one direction; others: see `plan_zebra`."""
        cfg = self._cfg
        both = cfg.attention_s, cfg.experts_s, cfg.own_s
        times = SideTimes(*both, sent, cfg.bandwidth, cfg.loss_s, cfg.start_s)
        return plan_zebra(times, layers, num_experts, choices, chunk=chunk, most=cfg.most)


class Zebra(Configurable):
    """Experts on devices of their own, behind those of the trainer's `mesh`, which compute all else.

    The batch is computed in microbatches, so that both groups are busy: while one attends, experts compute another.
    """

    class Config(ConfigBase["Zebra"]):
        mesh: dict[str, int] = REQUIRED  # axis -> size over experts' devices: {"expert": 4}
        microbatches: int | None = None  # parts of a batch; None: by `times`, or 4
        # Experts of each layer on attention's devices, or one number for all layers; None: by `times`, or none
        moved: tuple[int, ...] | None = None
        times: ZebraTimes.Config | None = None  # measured times of both groups, to plan by; None: nothing is planned

        @override
        def check_fields(self) -> None:
            self.require_least(1, "microbatches")
            wrong = [name for name, size in self.mesh.items() if size < 1]
            self.require("mesh", not wrong and bool(self.mesh), "axes with sizes of 1 or more, such as {'expert': 2}")
            other = [name for name in self.mesh if name in ("pipeline", "sequence")]
            self.require("mesh", not other, "no axis pipeline or sequence: experts see rows of tokens")

        def check_trainer(self, trainer: Any) -> None:
            """Refuse what has no zebra step (ConfigError)."""
            check_divided(trainer, "zebra")
            no: dict[str, Any] = {"elastic": None, "replicas": None, "sdc_check": None, "slices": {}}
            for field, none in {**no, "compiler_options": {}, "microbatches": 1}.items():
                also = ", whose own `microbatches` take their place" if field == "microbatches" else ""
                trainer.require(field, getattr(trainer, field) == none, f"{none} with zebra{also}")
            for axis in ("pipeline", "sequence"):
                trainer.require("mesh", trainer.mesh.get(axis, 1) == 1, f"no axis {axis} with zebra")
            one = jax.process_count() == 1
            self.require("mesh", one, f"one process with all devices; there are {jax.process_count()}")

        def divide(self, mesh: dict[str, int], devices: Sequence[Any] | None) -> tuple[Mesh, Mesh]:
            """Return the mesh of attention's devices and that of experts' (MeshError, ConfigError: they do not fit)."""
            every = list(jax.devices() if devices is None else devices)
            count = math.prod(self.mesh.values())
            others = len(every) - count if -1 in mesh.values() else math.prod(mesh.values())
            wanted = f"with the {others} of attention's (mesh) at most the {len(every)} that there are"
            self.require("mesh", 1 <= others <= len(every) - count, f"{count} devices that fit, {wanted}")
            first, second = every[:others], every[others : others + count]
            return make_mesh(mesh, first), make_mesh(self.mesh, second)

        def plan(self, trainer: Any, meshes: Sequence[Mesh]) -> ZebraPlan | None:
            """Return the plan by the stated times (None: there are none)."""
            if self.times is None:
                return None
            model: Any = resolve(trainer.model, build_abstract)
            rows, length, feed = trainer.input.batch_size, trainer.input.seq_len, model.block.feed_forward
            width = 2 if model.dtype == "bfloat16" else 4
            sent = rows * length * (model.dim * width + feed.router.top_k * 8.0)
            choices = [self.microbatches] if self.microbatches else [n for n in (1, 2, 4, 8, 16) if rows % n == 0]
            fits = [n for n in choices if all(rows // n % _shards(mesh) == 0 for mesh in meshes)]
            chunk = _chunk(meshes)
            return self.times.build().plan(sent, model.num_layers, feed.num_experts, fits or choices[:1], chunk)

        def settled(self, trainer: Any, meshes: Sequence[Mesh]) -> tuple[int, tuple[int, ...]]:
            """Return the number of microbatches, and each layer's experts on attention's devices.

            Raises:
                ConfigError: rows or experts do not divide over both groups.
            """
            plan, layers = self.plan(trainer, meshes), trainer.model.num_layers
            count = self.microbatches or (plan.microbatches if plan else _MICROBATCHES)
            for mesh in meshes:
                with use_mesh(mesh, trainer.axis_rules):
                    check_rows(trainer.input, mesh, count)
            moved = self.moved if self.moved is not None else plan.moved if plan else (0,)
            moved = moved * layers if len(moved) == 1 else moved
            self.require("moved", len(moved) == layers, f"a number, or one for each of the model's {layers} layers")
            every, chunk = trainer.model.block.feed_forward.num_experts, _chunk(meshes)
            attention, experts = (mesh.shape["expert"] for mesh in meshes)
            fits = all(0 <= n < every and n % attention == 0 and (every - n) % experts == 0 for n in moved)
            expected = f"multiples of {chunk} below {every}: both groups have equally many on each device of their axis"
            self.require("moved", fits, f"{expected} expert ({experts} for experts, {attention} for attention)")
            return count, moved

        def program(self, trainer: Any, mesh: Mesh, learner: Learner) -> TrainProgram:
            """Return the zebra step, where `mesh` is that of attention's devices; the state is described."""
            devices = list(mesh.devices.flat)
            others = [device for device in jax.devices() if device not in devices]
            meshes = self.divide(trainer.mesh, [*devices, *others])
            count, moved = self.settled(trainer, meshes)
            return _program(trainer, meshes, learner, count, moved)

        def told(self, trainer: Any, meshes: Sequence[Mesh]) -> dict[str, Any]:
            """Return fields of the event that a run begins with: where what is computed, and the plan's line."""
            (count, moved), plan = self.settled(trainer, meshes), self.plan(trainer, meshes)
            groups = {"attention_devices": meshes[0].size, "experts_devices": meshes[1].size}
            return {**groups, "microbatches": count, "moved": list(moved), "plan": plan.line() if plan else None}

    def __init__(self, cfg: Config):
        self._cfg = cfg


def first_by_group(program: TrainProgram, seed: int) -> Callable[[Params], Params]:
    """Return the function from described parameters to the first ones, made on the devices of each group."""

    def first(like: Params) -> Params:
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
        names = frozenset(path for path in paths if EXPERTS in path.split("/"))
        found: list[Params] = []
        for chosen in (lambda params: without(params, names), lambda params: only(params, names)):
            here = chosen(like)
            with use_mesh(jax.tree.leaves(here)[0].sharding.mesh):
                found.append(first_params(program.init, seed, here, chosen))
        return merged(*found)

    return first


def _program(
    trainer: Any, meshes: tuple[Mesh, Mesh], learner: Learner, count: int, moved: tuple[int, ...]
) -> TrainProgram:
    model: Any = resolve(trainer.model, build_abstract)
    loss, rules = trainer.loss.build(), trainer.axis_rules
    split = ExpertSplit(moved, model.block.feed_forward.num_experts, *meshes)
    described: list[Any] = []
    for mesh in reversed(meshes):
        with use_mesh(mesh, rules):
            graphdef, state, init = describe_state(trainer.model, learner, mesh)
            described.insert(0, state)
    with use_mesh(meshes[0], rules):
        attention = AttentionStages(model, loss, count)
        lane = ExpertLane(partial(ExpertStages, model.block.feed_forward.experts), split, meshes, rules)
        step = ZebraStep(attention, lane, learner, split, meshes, rules)
        return TrainProgram(step, split.described(*described), graphdef, init)


def check_divided(trainer: Any, field: str) -> None:
    """Refuse what a state cannot be divided for between experts and the rest (ConfigError); `field` asks for that.

    All layers of the model are the same block with a mixture of experts, unwrapped, and the optimizer treats every
    number alone.
    """
    model = trainer.model
    trainer.require("model", isinstance(model, Decoder.Config), f"a Decoder.Config with {field}")
    block = model.block
    model.require(
        "block",
        type(block) is Block.Config,
        f"Block.Config with {field}: all layers alike, without norms behind the feed-forward layer",
    )
    dense = f"MoE.Config with {field}, which puts experts apart from the rest: a dense model has none"
    block.require("feed_forward", type(block.feed_forward) is MoE.Config, dense)
    plain = type(block.feed_forward.experts) in (Experts.Config, BiasedExperts.Config)
    block.feed_forward.require("experts", plain, f"Experts.Config with {field}, without adapters or fewer bits")
    nothing = f'"nothing" with {field}: each layer is recomputed from its input'
    model.require("remat", model.remat == "nothing", nothing)
    dropping = drops_out(model)
    trainer.require("model", dropping is None, f"one without dropout, with {field} ({dropping} has some)")
    supervised = isinstance(trainer.loss, SupervisedLoss.Config)
    trainer.require("loss", supervised, f"SupervisedLoss.Config with {field}")
    learner = trainer.learner
    learner.require("groups", learner.groups == (), f"() with {field}")
    learner.require("state_storage", learner.state_storage == (), f"() with {field}")
    learner.require("clip", learner.clip is None, f"None with {field}; clip_norm is that of all parameters")
    by_number = isinstance(learner.optimizer, AdamW.Config | Lion.Config | SGD.Config)
    learner.require("optimizer", by_number, f"AdamW, Lion or SGD with {field}, which treat every number alone")


def _shards(mesh: Mesh) -> int:
    return mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]


def _chunk(meshes: Sequence[Mesh]) -> int:
    """Return how many experts move together: as many on each device of the axis `expert` of both groups."""
    return math.lcm(*(mesh.shape["expert"] for mesh in meshes))
