"""Fields of the policy trainer, and the programs and refusals that follow from them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, override

import jax
from jax.sharding import Mesh

from axlearn_like.checkpoint.interval import SAVE_EVERY
from axlearn_like.config import REQUIRED, ConfigBase, ConfigError, config_key, errors_at, path_of, walk_configs
from axlearn_like.kernels.attention.context_parallel.ring import Ring
from axlearn_like.kernels.exact.parts import require_tensor
from axlearn_like.kernels.exact.scope import numerics_of
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.moe.routing import RoutingLayout
from axlearn_like.layers.pipeline import Pipeline
from axlearn_like.learner import Learner
from axlearn_like.training.alignment.reference import Reference
from axlearn_like.training.program import TrainProgram, check_length
from axlearn_like.training.session import TrainingConfig
from mesh import make_mesh
from mesh.mesh import PlaceholderDevice
from mesh.programs.shared import shared_program
from mesh.rules import axis_sizes, mesh_axes, use_mesh, use_rules
from rl.controller.evaluations import METRICS
from rl.objective import GeneralisedAdvantage, Objective
from rl.protocol.experiment import ExperimentFields
from rl.training.batching import Layout, PackedRows, PaddedRows
from rl.training.columns import CandidateTokens, Routing, TokenColumn, routing_layout
from rl.training.compatibility import check_policies
from rl.training.critic import Critic, SharedCritic
from rl.training.critic.shared import JointLearner, ValueTerm
from rl.training.packing import Packing
from rl.training.program import Described, describe_batch, describe_packed, describe_rows, policy_program
from rl.training.scoring.reference_states import DescribedPolicy, describe_policy, head_graph
from rl.training.spec import UpdateSpec
from rl.training.updates import Updates

_RENAMED = {"max_prompt": "max_prompt_tokens", "max_new": "max_new_tokens", "solved_at": "correct_threshold"}
_RENAMED["support"] = "candidate_tokens"


class PolicyTrainingConfig[T](TrainingConfig[T], renamed=_RENAMED):
    """Fields of `PolicyTrainer.Config`, what they make of a mesh, and what they refuse."""

    objective: Objective.Config = REQUIRED
    processes: int = 1  # number of processes that share the mesh, one on each host
    staleness: int = REQUIRED  # versions behind the current one that workers may still ask for
    evaluate_every: int | None = REQUIRED  # versions that are its multiples are evaluated; None: none in between
    max_prompt_tokens: int = REQUIRED
    max_new_tokens: int = REQUIRED
    temperature: float = REQUIRED  # temperature of the behaviour policy, used for scoring too
    row_multiple: int = 1  # batches are padded to a multiple of this many rows
    samples_per_row: int | None = None  # samples of a prompt in a row; the prompt is computed for each row; None: all
    packing: Packing.Config | None = None  # packing of rollouts by length; None: rows are padded to max_new_tokens
    chunks: int = 1  # parts into which a row's tokens are cut for the head; logits of one part exist at a time
    candidate_tokens: int | None = None  # recorded for each token at most: `most` of a RecordedSampler (columns.py)
    # Words whose logits exist at a time, a multiple of 128; all, if there are fewer. None: all words of a chunk.
    head_tile: int | None = None
    replay_routing: bool = False  # experts are those with which the engine drew the tokens (columns.py)
    logprob_diff_every: int = 10  # updates between comparisons of trainer and sampler log-probabilities
    correct_threshold: float = 1.0  # reward from which on a rollout is right, in metrics (lengths by outcome)
    log_every: int = 1
    updates: Updates.Config | None = None  # several updates for each batch; None: one
    reference: Reference.Config | None = None  # policy of a term such as ReferenceKL
    reference_devices: str | None = REQUIRED  # devices of the reference role; None: the trainer's
    reference_mesh: dict[str, int] = {"fsdp": -1}  # axes over those devices

    def program(self, mesh: Mesh, learner: Learner | None = None) -> TrainProgram:
        """Return the update on a mesh; the learner is built unless it is given (UserError: it does not fit)."""
        self.check_rows(mesh)
        check_length(
            self.model, self.max_prompt_tokens + self.max_new_tokens, "max_prompt_tokens + max_new_tokens", "policy"
        )
        objective = self.completed_objective()
        spec = self.spec()
        shared = self.critic if isinstance(self.critic, SharedCritic.Config) else None
        compared = self.reference if objective.build().needs_exact_kl else None
        parts = (self.model, objective, self.learner, self.axis_rules, self.compiler_options, spec.key, compared)
        key = ("rl update", config_key(parts), mesh)

        def make() -> TrainProgram:
            with jax.set_mesh(mesh):
                values = None if shared is None else ValueTerm(shared, self.model)
                known = self._compared(mesh)
                head = None if known is None else head_graph(known)
            parts = self.model, objective.build(), learner or self.build_learner(), mesh
            whole = dataclasses.replace(spec, values=values, reference_head=head)
            return policy_program(*parts, whole, self.compiler_options)

        with use_rules(self.axis_rules):
            return shared_program(key, make)

    def batches(self, mesh: Mesh, *, groups: int, samples: int) -> dict[int, Described]:
        """Return the arrays of a microbatch for each length of rows, the longest first.

        Padded rows have one length, and are those of a whole update by `samples` rollouts of `groups` prompts, all with
        a gradient.
        """
        packing, objective, columns = self.build_packing(), self.build_objective(), self.columns()
        with use_mesh(mesh, self.axis_rules):
            if packing is None:
                sizes: dict[str, Any] = {"layout": self.padded_rows(), "groups": groups, "samples": samples}
                found = {self.max_new_tokens: describe_batch(objective, mesh, **sizes, columns=columns)}
            else:
                describe = partial(describe_packed, objective, packing, mesh, samples=samples, columns=columns)
                found = {length: describe(length) for length in packing.lengths}
            if (known := self._compared(mesh)) is None:
                return found
            states = known.states(self.chunks)
            return {n: {**batch, **states.describe(known.params, batch, mesh)} for n, batch in found.items()}

    def _compared(self, mesh: Mesh) -> DescribedPolicy | None:
        """Return the reference whose whole distributions an update compares with; None: it takes none, or a number."""
        if self.reference is None or not self.build_objective().needs_exact_kl:
            return None
        return describe_policy(self.model, self.reference, mesh)

    def completed_objective(self) -> Objective.Config:
        """Return the objective; with one update a batch, "recompute" becomes "current", which is the same."""
        once = self.objective.old_policy == "recompute" and (self.updates is None or self.updates.count == 1)
        return self.objective.clone(old_policy="current") if once else self.objective

    def build_objective(self) -> Objective:
        """Build the completed objective."""
        return self.completed_objective().build()

    def build_learner(self) -> Learner:
        """Build the learner of the update: the policy's, joined with that of a head which shares its trunk."""
        critic = self.critic
        if isinstance(critic, SharedCritic.Config):
            return JointLearner(self.learner, critic.learner, self.model)
        return self.learner.build()

    @property
    def critic(self) -> Critic.Config | SharedCritic.Config | None:
        """The critic of the objective's advantage, if it has one."""
        advantage = self.objective.advantage
        if not isinstance(advantage, GeneralisedAdvantage.Config):
            return None
        critic: Any = advantage.critic
        fits = isinstance(critic, Critic.Config | SharedCritic.Config)
        advantage.require("critic", fits, "a Critic.Config or SharedCritic.Config (rl.training.critic)")
        return critic

    @property
    def critic_programs(self) -> tuple[str, ...]:
        """Names of the programs of the critic alone: its update, if it makes one of its own, and its values."""
        if self.critic is None:
            return ()
        return ("values",) if self.critic.in_update else ("critic", "values")

    def build_critic(self, graphdef: Any) -> Critic | SharedCritic | None:
        """Return the critic, if there is one; the mesh is set. `graphdef`: the policy's."""
        if isinstance(self.critic, SharedCritic.Config):
            return self.critic.build(policy=self.model, graphdef=graphdef, sizes=self.padded_rows())
        if self.critic is None:
            return None
        return self.critic.build(policy=self.model, sizes=self.padded_rows(), microbatches=self.microbatches)

    def build_packing(self) -> Packing | None:
        """Return the packing of rollouts into rows, if there is one (UserError: it does not fit)."""
        if self.packing is None:
            return None
        instead = "packing.rows and packing.lengths say what a microbatch has"
        self.require("microbatches", self.microbatches == 1, f"1 with packing: {instead}")
        self.require("samples_per_row", self.samples_per_row is None, f"None with packing: {instead}")
        recorded = self.packing.tree and any(column.scored for column in self.columns())
        why = "rollouts that share a token have a record of it each (replay_routing, RecordedSampler)"
        self.packing.require("tree", not recorded, f"False, for {why}")
        return self.packing.build(
            max_prompt_tokens=self.max_prompt_tokens, max_new_tokens=self.max_new_tokens, chunks=self.chunks
        )

    def rows(self, mesh: Mesh, *, groups: int, samples: int) -> Described:
        """Return the arguments of scoring as many rollouts."""
        with use_mesh(mesh, self.axis_rules):
            return describe_rows(mesh, self.padded_rows(), rollouts=groups * samples, columns=self.columns())

    def columns(self) -> tuple[TokenColumn, ...]:
        """Return what travels with each token of a rollout into the rows of an update."""
        routing = self.replay_layout()
        return (
            *([] if routing is None else [Routing(routing)]),
            *([] if self.candidate_tokens is None else [CandidateTokens(self.candidate_tokens)]),
        )

    def replay_layout(self) -> RoutingLayout | None:
        """Return what the record is made of that is replayed; None: none is (ConfigError: there are no experts)."""
        if not self.replay_routing:
            return None
        layout = routing_layout(self.model)
        self.require("replay_routing", layout is not None, "False, for the policy has no mixtures of one kind")
        return layout

    def spec(self) -> UpdateSpec:
        """Return the settings that follow from this config alone: without a critic and a reference."""
        max_new_tokens = None if self.packing is None else self.max_new_tokens
        settings = self.temperature, self.chunks, self.head_tile, self.microbatches, max_new_tokens
        return UpdateSpec(*settings, columns=self.columns())

    def layout(self) -> Layout:
        """Return the layout of rows on the mesh in force."""
        packing = self.build_packing()
        return self.padded_rows() if packing is None else PackedRows(packing, math.prod(axis_sizes("batch").values()))

    def padded_rows(self) -> PaddedRows:
        """Return the layout of padded rows."""
        return PaddedRows(self.max_prompt_tokens, self.max_new_tokens, self.row_multiple, self.samples_per_row)

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

    def requires(self, experiment: ExperimentFields) -> None:
        """Refuse rows that do not divide, and a reference policy and an objective that do not fit each other."""
        check_policies(experiment.objective, self)
        samples, each_row = experiment.samples_per_prompt, self.samples_per_row or experiment.samples_per_prompt
        self.require("samples_per_row", samples % each_row == 0, f"a divisor of samples_per_prompt={samples}")
        tokens = f"the {each_row} x {experiment.max_new_tokens} tokens of a row"
        fits = self.chunks >= 1 and each_row * experiment.max_new_tokens % self.chunks == 0
        self.require("chunks", self.packing is not None or fits, f"a divisor of {tokens}")

    @override
    def check_fields(self) -> None:
        super().check_fields()
        if self.keep_best is not None and self.keeps_best_by_evaluation:
            some, save_every = self.evaluate_every is not None, self.checkpoint.save_every or SAVE_EVERY
            self.keep_best.require("metric", some, f"no {METRICS}... without evaluate_every of the experiment")
            saved = self.evaluate_every is None or self.evaluate_every % save_every == 0
            expected = f"a divisor of evaluate_every={self.evaluate_every}, so that what is evaluated is saved"
            self.checkpoint.require("save_every", saved, expected)
        self.require_least(1, "processes", "row_multiple", "chunks", "samples_per_row")
        alone = not (self.replay_routing and isinstance(self.critic, SharedCritic.Config))
        self.require("replay_routing", alone, "False with a SharedCritic, whose values are by the routers' own experts")
        if self.head_tile is not None:
            self.require("head_tile", self.head_tile > 0 and self.head_tile % 128 == 0, "a multiple of 128, or None")
        devices = math.prod(self.mesh.values())
        if self.processes > 1:
            expected = (
                f"axes, such as {{'fsdp': {self.processes}}}, whose devices divide over {self.processes} processes"
            )
            self.require("mesh", bool(self.mesh) and (devices < 0 or devices % self.processes == 0), expected)
        self.check_axes({axis: size for axis, size in self.mesh.items() if size > 0})

    def check_sizes(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Return the mesh, if it fits the devices, and batches and model fit it (else UserError)."""
        with self.errors_in("mesh"):
            mesh = make_mesh(self.mesh, devices, slices=self.slices)
        self.check_rows(mesh)
        self._check_numerics(mesh)
        whole = not self.replay_routing or mesh.shape["pipeline"] == 1
        self.require("replay_routing", whole, "False on a mesh with a pipeline axis")
        self.check_model(mesh)
        return mesh

    def _check_numerics(self, mesh: Mesh) -> None:
        """Refuse axes over which exact numerics have no order of sums on TPUs (ConfigError)."""
        if numerics_of(self.model) == "exact" and mesh.devices.flat[0].platform == "tpu":
            exact = 'with policy.numerics="exact"'
            require_tensor(self, mesh.shape["tensor"])
            for axis in ("expert", "pipeline"):
                self.require(
                    "mesh", mesh.shape[axis] == 1, f"no axis {axis} {exact}; tensor and fsdp can shard experts"
                )

    def described_devices(self) -> list[PlaceholderDevice]:
        """Return as many devices as the mesh has; none if that is known in the trainer only."""
        count = 0 if -1 in self.mesh.values() else math.prod(self.mesh.values())
        return [PlaceholderDevice() for _ in range(count)]

    def check_rows(self, mesh: Mesh) -> None:
        """Refuse what cannot be computed on the mesh, and batches that do not divide over it (UserError)."""
        self.build_packing()
        self.check_axes(mesh.shape)
        axes = mesh_axes("batch", self.axis_rules)
        rows = math.prod(mesh.shape[axis] for axis in axes) * self.microbatches
        fits = self.row_multiple % rows == 0
        self.require("row_multiple", fits, f"a multiple of {' x '.join(axes)} x microbatches = {rows}")
        if (stages := math.prod(mesh.shape[axis] for axis in mesh_axes("layers", self.axis_rules))) > 1:
            self._check_stages(stages, rows)

    def check_axes(self, sizes: Mapping[str, int]) -> None:
        """Refuse what cannot be computed where a mesh shards the length of rows (ConfigError)."""
        cut = [axis for axis in mesh_axes("length", self.axis_rules) if sizes.get(axis, 1) > 1]
        if not cut:
            return
        why = f"on a mesh with a {cut[0]} axis, whose devices share the tokens of a row"
        if self.packing is not None:
            self.packing.require("tree", not self.packing.tree, f"False {why}")
        for path, layer in walk_configs(self.model):
            if isinstance(layer, Ring.Config):
                place = f"policy.{path}"
                raise ConfigError(f"{place}: expected AllGather.Config() in RL {why}, got {layer!r}", place)

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
            params = split(build_abstract(self.model))[1]
        if self.reference is not None and self.reference_devices is None:
            self._check_reference(self.reference, mesh, params)
        if self.critic is not None:
            self._check_own_model(self.critic)
            with use_rules(self.axis_rules), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                self.critic.check_policy(self.model, mesh)

    def check_reference(self, devices: Sequence[Any]) -> Mesh:
        """Return the mesh of a reference on devices of its own, if policy and reference fit it (else UserError)."""
        assert self.reference is not None, "a fleet's reference role is refused without one"
        with self.errors_in("reference_mesh"):
            mesh = make_mesh(self.reference_mesh, devices)
        abstract = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        with use_rules(self.axis_rules), abstract, errors_at("policy", self.model):
            params = split(build_abstract(self.model))[1]
        self._check_reference(self.reference, mesh, params)
        return mesh

    def _check_own_model(self, role: ConfigBase[Any]) -> None:
        """Refuse rollouts longer than the positions of a model that a teacher or a critic has of its own."""
        if (own := getattr(role, "model", None)) is not None:
            check_length(
                own,
                self.max_prompt_tokens + self.max_new_tokens,
                "max_prompt_tokens + max_new_tokens",
                f"{path_of(role)}.model",
            )

    def _check_reference(self, reference: Reference.Config, mesh: Mesh, params: Any) -> None:
        self._check_own_model(reference)
        with use_rules(self.axis_rules), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            reference.check_policy(self.model, params, self.learner.build().frozen(params))
