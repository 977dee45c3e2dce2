"""The policy trainer: takes whole batches from the controller, updates, publishes.

The order of things, so that a trainer may die between any two of them: publish version s, take batch s, update, mark
batch s as consumed, publish s + 1, save. After a restart the restored version is published *before* data is asked for.

It may be several processes that share one mesh. All run this code; the first, the leader, decides what is next and
speaks for all with the controller and in the log. Each pushes its own part of the weights.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, override

import jax
from flax import nnx
from jax.sharding import Mesh

from axlearn_like.config import REQUIRED, Configurable, errors_at, walk_configs
from axlearn_like.layers.base import Params, split
from axlearn_like.layers.moe.routing import RoutingLayout
from axlearn_like.layers.pipeline import Pipeline
from axlearn_like.learner import Learner
from axlearn_like.operations.memory import check_state_fits
from axlearn_like.operations.utilisation import row_flops
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.losses import SupervisedLoss
from axlearn_like.training.minibatches import MinibatchStep
from axlearn_like.training.program import Program, check_length
from axlearn_like.training.session import Session, TrainingConfig
from axlearn_like.training.step import State
from mesh import make_mesh
from mesh.distributed import ProcessGroup
from mesh.mesh import PlaceholderDevice
from mesh.rules import mesh_axes, use_mesh, use_rules
from rl.controller.evaluations import METRICS
from rl.objective import Objective
from rl.parameter_server.client import ParameterServerClient
from rl.roles.protocols import BatchSource
from rl.training.feed import PolicyFeed
from rl.training.logprob_diff import LogprobDiff, difference_bounds
from rl.training.packing import Packing
from rl.training.program import Described, describe_batch, describe_packed, describe_rows, policy_program
from rl.training.publication import Publication
from rl.training.reference import Reference
from rl.training.replay import routing_layout
from rl.training.updates import Updates

_EVALUATION_POLL = 0.2  # seconds between two questions for the end of the last evaluation


class PolicyTrainer(Configurable):
    """One update a batch, on a named mesh, in the loop and with the operations of supervised training."""

    class Config(TrainingConfig["PolicyTrainer"]):
        objective: Objective.Config = REQUIRED
        processes: int = 1  # that share the mesh: an actor each, on a host each if there are several
        staleness: int = REQUIRED  # versions behind the current one that workers may still ask for
        evaluate_every: int | None = REQUIRED  # versions that are its multiples are evaluated; None: none in between
        max_prompt: int = REQUIRED
        max_new: int = REQUIRED
        temperature: float = REQUIRED  # of the behaviour policy; the trainer scores under the same
        row_multiple: int = 1  # batches are padded to a multiple of this many rows
        samples_per_row: int | None = None  # of a prompt, which is computed again for every row; None: all in one row
        packing: Packing.Config | None = None  # of rollouts into rows by length; None: rows are padded to max_new
        chunks: int = 1  # parts into which a row's tokens are cut for the head; logits of one part exist at a time
        replay_routing: bool = False  # experts are those with which the engine drew the tokens (replay.py)
        logprob_diff_every: int = 10  # updates between comparisons of trainer and sampler log-probabilities
        log_every: int = 1
        updates: Updates.Config | None = None  # several by each batch; None: one
        reference: Reference.Config | None = None  # policy of a term such as ReferenceKL

        def program(self, mesh: Mesh, learner: Learner | None = None) -> Program:
            """Return the update on a mesh; the learner is built unless it is given (UserError: it does not fit)."""
            self.check_rows(mesh)
            check_length(self.model, self.max_prompt + self.max_new, "max_prompt + max_new", "policy")
            objective, learner = self.build_objective(), learner or self.learner.build()
            settings: dict[str, Any] = {
                "temperature": self.temperature,
                "microbatches": self.microbatches,
                "chunks": self.chunks,
                "max_new": None if self.packing is None else self.max_new,
                "compiler_options": self.compiler_options,
            }
            with use_rules(self.axis_rules):
                return policy_program(self.model, objective, learner, mesh, **settings)

        def batch(self, mesh: Mesh, *, groups: int, samples: int) -> Described:
            """Return the arrays of an update by `samples` rollouts of `groups` prompts, all with a gradient."""
            sizes: dict[str, Any] = {**self.sizes(), "samples_per_row": self.samples_per_row}
            with use_mesh(mesh, self.axis_rules):
                sizes["replay"] = self.replay_layout()
                return describe_batch(self.build_objective(), mesh, groups=groups, samples=samples, **sizes)

        def packed(self, mesh: Mesh, *, samples: int) -> dict[int, Described]:
            """Return the arrays of a microbatch for each length of rows; `samples` are those of a group."""
            packing = self.build_packing()
            if packing is None:
                return {}
            with use_mesh(mesh, self.axis_rules):
                describe = partial(describe_packed, self.build_objective(), packing, mesh, samples=samples)
                describe = partial(describe, replay=self.replay_layout())
                return {length: describe(length) for length in packing.lengths}

        def build_objective(self) -> Objective:
            """Return the objective; with one update a batch, "recompute" becomes "current", which is the same."""
            once = self.objective.old_policy == "recompute" and (self.updates is None or self.updates.count == 1)
            return (self.objective.clone(old_policy="current") if once else self.objective).build()

        def build_packing(self) -> Packing | None:
            """Return the packing of rollouts into rows, if there is one (UserError: it does not fit)."""
            if self.packing is None:
                return None
            instead = "packing.rows and packing.lengths say what a microbatch has"
            self.require("microbatches", self.microbatches == 1, f"1 with packing: {instead}")
            self.require("samples_per_row", self.samples_per_row is None, f"None with packing: {instead}")
            return self.packing.build(max_prompt=self.max_prompt, max_new=self.max_new, chunks=self.chunks)

        def rows(self, mesh: Mesh, *, groups: int, samples: int) -> Described:
            """Return the arguments of scoring as many rollouts."""
            with use_mesh(mesh, self.axis_rules):
                replay = self.replay_layout()
                return describe_rows(mesh, rollouts=groups * samples, **self.sizes(), replay=replay)

        def replay_layout(self) -> RoutingLayout | None:
            """Return what the record is made of that is replayed; None: none is (ConfigError: there are no experts)."""
            if not self.replay_routing:
                return None
            layout = routing_layout(self.model)
            self.require("replay_routing", layout is not None, "False, for the policy has no mixtures of one kind")
            return layout

        def sizes(self) -> dict[str, Any]:
            """Return the sizes of a batch that are fields of this config."""
            return {"max_prompt": self.max_prompt, "max_new": self.max_new, "row_multiple": self.row_multiple}

        def check(self, devices: Sequence[Any] | None = None) -> None:
            """Refuse, too, batches or a model that do not fit the mesh, as far as its devices are known here.

            `devices`: of the trainer, described; None: those of this process; empty: not known.
            """
            super().check()
            if self.processes > 1:
                devices = devices or self.described_devices()
            if devices is None or devices:
                self.check_sizes(devices)

        @property
        def keeps_best_by_evaluation(self) -> bool:
            """True if the best checkpoints are those with the best evaluations by the workers."""
            return self.keep_best is not None and self.keep_best.metric.startswith(METRICS)

        def evaluates(self, version: int) -> bool:
            """Return True if the workers evaluate this version during RL or after it."""
            return version == self.num_steps or bool(self.evaluate_every and version % self.evaluate_every == 0)

        @override
        def check_fields(self) -> None:
            super().check_fields()
            if self.keep_best is not None and self.keeps_best_by_evaluation:
                some, save_every = self.evaluate_every is not None, self.checkpoint.save_every
                self.keep_best.require("metric", some, f"no {METRICS}... without evaluate_every of the experiment")
                saved = self.evaluate_every is None or self.evaluate_every % save_every == 0
                expected = f"a divisor of evaluate_every={self.evaluate_every}, so that what is evaluated is saved"
                self.checkpoint.require("save_every", saved, expected)
            self.require_least(1, "processes", "row_multiple", "chunks", "samples_per_row")
            devices = math.prod(self.mesh.values())
            if self.processes > 1:
                expected = (
                    f"axes, such as {{'fsdp': {self.processes}}}, whose devices divide over {self.processes} processes"
                )
                self.require("mesh", bool(self.mesh) and (devices < 0 or devices % self.processes == 0), expected)
            self.check_axes({axis: size for axis, size in self.mesh.items() if size > 0})

        def check_sizes(self, devices: Sequence[Any] | None = None) -> Mesh:
            """Return the mesh, if it fits the devices, and batches and model fit it (else UserError)."""
            mesh = make_mesh(self.mesh, devices, slices=self.slices)
            self.check_rows(mesh)
            whole = not self.replay_routing or mesh.shape["pipeline"] == 1
            self.require("replay_routing", whole, "False on a mesh with a pipeline axis")
            self.check_model(mesh)
            return mesh

        def described_devices(self) -> list[PlaceholderDevice]:
            """Return as many devices as the mesh has; none if that is known in the trainer only."""
            count = 0 if -1 in self.mesh.values() else math.prod(self.mesh.values())
            return [PlaceholderDevice() for _ in range(count)]

        def check_rows(self, mesh: Mesh) -> None:
            """Refuse axes over which no rollout is cut, and batches that do not divide over the mesh (UserError)."""
            self.build_packing()
            self.check_axes(mesh.shape)
            axes = mesh_axes("batch", self.axis_rules)
            rows = math.prod(mesh.shape[axis] for axis in axes) * self.microbatches
            fits = self.row_multiple % rows == 0
            self.require("row_multiple", fits, f"a multiple of {' x '.join(axes)} x microbatches = {rows}")
            if (stages := math.prod(mesh.shape[axis] for axis in mesh_axes("layers", self.axis_rules))) > 1:
                self._check_stages(stages, rows)

        def check_axes(self, sizes: Mapping[str, int]) -> None:
            """Refuse a mesh that shards the length of rows: a completion follows its prompt, which is beside it."""
            cut = [axis for axis in mesh_axes("length", self.axis_rules) if sizes.get(axis, 1) > 1]
            self.require("mesh", not cut, f"no {', '.join(cut)} axis: RL shards rows (data, fsdp), not their length")

        def _check_stages(self, stages: int, rows: int) -> None:
            """Refuse rows that do not divide into the microbatches of a pipeline (UserError)."""
            pipelines = [cfg for _, cfg in walk_configs(self.model) if isinstance(cfg, Pipeline.Config)]
            parts = (pipelines[0].microbatches if pipelines else None) or 4 * stages
            because = f"the pipeline's {parts} microbatches (policy.pipeline.microbatches)"
            if self.packing is not None:
                expected = f"a multiple of {because}"
                self.packing.require("rows", self.packing.rows % parts == 0, expected)
            fits = self.row_multiple % (rows * parts) == 0
            self.require("row_multiple", fits, f"a multiple of {rows} x {because} = {rows * parts}")

        def check_model(self, mesh: Mesh) -> None:
            """Refuse layers that do not divide over the mesh, by their paths (UserError)."""
            abstract = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
            with use_rules(self.axis_rules), abstract, errors_at("policy", self.model):
                params = jax.eval_shape(lambda: split(self.model.build(rngs=nnx.Rngs(0)))[1])
            if self.reference is not None:
                self.reference.check_params(params, self.learner.build().frozen(params))

    def __init__(
        self,
        cfg: Config,
        *,
        run: RunDirectory,
        controller: BatchSource,
        weights: ParameterServerClient,
        initial: Callable[[Any], Params] | None = None,
        seed: int = 0,
        processes: ProcessGroup | None = None,
    ):
        """Restore the newest checkpoint, or start.

        Args:
            cfg: of the trainer, as the experiment has completed it.
            run: open.
            controller: source of batches.
            weights: access to the parameter server.
            initial: maps abstract parameters to version 0; None: the model's own initialisation.
            seed: of that initialisation.
            processes: of this trainer; None: this one alone.
        """
        self.cfg, self._group = cfg, processes or ProcessGroup("trainer")
        self._controller = controller
        self.finished = False  # the last version is made and, if asked for, evaluated
        self._mesh, objective = cfg.check_sizes(), cfg.build_objective()
        learner, group = cfg.learner.build(), self._group
        where: dict[str, Any] = {"phase": "rl", "checkpoints": run.checkpoints / "rl"}
        config_text = run.config_path.read_text() if run.config_path.exists() else ""
        with use_mesh(self._mesh, self.cfg.axis_rules):
            self._session = Session(cfg, run, self._mesh, group, **where, config_text=config_text)
            program = cfg.program(self._mesh, learner)
            updates = None if cfg.updates is None else cfg.updates.build(seed=seed)
            step = (
                MinibatchStep(program.step) if updates is None else MinibatchStep(program.step, until=updates.too_far)
            )
            program = program._replace(step=step)
            frozen = learner.frozen(program.state["params"])
            reference = None if cfg.reference is None else cfg.reference.build(frozen=frozen)
            held = {} if reference is None else reference.describe(program.state["params"])
            check_state_fits({**program.state, **held}, self._mesh)
            pushes = EventLog(run.events_path)
            kept: dict[str, Any] = {"staleness": cfg.staleness, "evaluate_every": cfg.evaluate_every}
            kept["frozen"] = frozen
            self._publication = Publication(weights, controller, group, pushes, **kept)
            also = {"recent": self._publication.describe(program.state["params"]), **held}
            state, step, extras = self._session.restore_or_start(program, learner, seed=seed, params=initial, also=also)
            if extras is not None:
                self._publication.restore(state.pop("recent"), extras["versions"], state["params"])
            if reference is not None:
                reference.start(state["params"]) if extras is None else reference.restore(state)
            sizes: dict[str, Any] = {**cfg.sizes()}
            replay = cfg.replay_layout()
            scoring: dict[str, Any] = {"temperature": cfg.temperature, "chunks": cfg.chunks, "group": group}
            dtype = getattr(cfg.model, "dtype", "float32")
            scoring["bounds"] = difference_bounds(dtype, weights.codec)
            scoring["replay"] = replay
            self.diff = LogprobDiff(program.graphdef, **scoring, **sizes)
            feed = PolicyFeed(
                *(controller, self._publication, objective, self.diff, group, self._session.events),
                diff_every=cfg.logprob_diff_every,
                sizes={**sizes, "samples_per_row": cfg.samples_per_row},
                packing=cfg.build_packing(),
                updates=updates,
                reference=reference,
                replay=replay,
                flops=partial(row_flops, cfg.model) if self._session.peak else lambda *sizes: None,
                on_update=self.offer_evaluated,
            )
            if cfg.keeps_best_by_evaluation:
                self._session.tiers.expect_values(lambda step: cfg.evaluates(step) or ends_early(cfg, run, step))
            loss = SupervisedLoss.Config(chunks=cfg.chunks).build()  # of evaluators on supervised data
            self._loop = self._session.loop(state, step, program, feed, learner, loss)

    @property
    def state(self) -> State:
        """The train state."""
        return self._loop.state

    @property
    def step(self) -> int:
        """Completed updates, which is the version of the weights."""
        return self._loop.step

    def done(self) -> bool:
        """Return True if no update is left to make."""
        return self._loop.finished()

    def start(self) -> None:
        """Publish the current version and those that workers may still need; only then ask for data."""
        with use_mesh(self._mesh, self.cfg.axis_rules):
            self._publication.start(self.step, self.state["params"])
            self.offer_evaluated()
            self._session.clock.to("input")  # the first batch is awaited

    def run(self, stop: Callable[[], bool] = lambda: False) -> int:
        """Update until the last step, then await the last evaluation; or until `stop()` in any process. Saves.

        Returns the steps completed.
        """
        with self:
            self.start()
            with use_mesh(self._mesh, self.cfg.axis_rules):
                if self._loop.run(lambda: self._group.any(stop())):
                    self._await_evaluation(stop)
            self._end()
        self._group.barrier()  # a process that ends now takes nothing from the others
        return self.step

    def _await_evaluation(self, stop: Callable[[], bool]) -> None:
        """Keep the last version published until the controller has evaluated it; `finished` then says so."""
        self._publication.settle()
        self._tell_end()
        with self._session.clock.spending("evaluation"):
            while not self.finished and not self._group.any(stop()):
                self.finished = self._group.broadcast(self._group.leader and self._is_evaluated())
                if not self.finished and not self._publication.restart_if_forgotten(self.step, self.state["params"]):
                    time.sleep(_EVALUATION_POLL)
                self._tell_end()
                self._loop.beat(self.step)
        self.offer_evaluated()

    def _tell_end(self) -> None:
        """Tell the controller that this is the last version, though its plan goes on."""
        if self.step < self.cfg.num_steps and self._group.leader:
            self._controller.finish(self.step)

    def offer_evaluated(self) -> None:
        """Keep the best of the checkpoints that have been evaluated since they were saved."""
        tiers = self._session.tiers
        for step in tiers.pending():
            if (measured := self._controller.evaluation(step)) is not None:
                tiers.offer(step, measured)

    def _is_evaluated(self) -> bool:
        status = self._controller.status()
        return status["version"] >= self.step and status["evaluating"] is None

    def run_once(self, timeout: float = 0.0) -> bool:
        """Make one update; False if its batch did not become complete within `timeout` seconds."""
        with use_mesh(self._mesh, self.cfg.axis_rules):
            return self._loop.advance(timeout)

    def settle(self) -> None:
        """Wait until the current version can be pulled; raises what went wrong with it."""
        self._publication.settle()

    def save(self) -> None:
        """Start to write a checkpoint of the last update."""
        with use_mesh(self._mesh, self.cfg.axis_rules):
            self._loop.save()

    def close(self) -> None:
        """Save, wait until it is on disk, and end the session."""
        with self:
            self.save()
            if self.done():
                self._tell_end()
            self._end()

    def __enter__(self) -> "PolicyTrainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the operations; nothing is saved."""
        self._session.__exit__(kind, error, trace)

    def _end(self) -> None:
        self.settle()
        with self._session.clock.spending("checkpoint"):
            self._session.tiers.wait()
        self._session.end(self.step, "done" if self.done() else "stop requested")


def ends_early(cfg: PolicyTrainer.Config, run: RunDirectory, step: int) -> bool:
    """Return True if early stopping ends the run with this version, by the metrics on disk."""
    if cfg.early_stopping is None:
        return False
    rows = [row for row in read_rows(run.metrics_path) if row["phase"] == "rl"]
    return cfg.early_stopping.build()(rows, before=step)
