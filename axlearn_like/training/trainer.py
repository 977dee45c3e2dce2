"""The supervised trainer: one config, and one `run` that starts or resumes by itself."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.pretrained import pretrained_source
from axlearn_like.config import REQUIRED, ConfigBase, Configurable, MeshRules, config_key, path_of, resolve, to_text
from axlearn_like.elastic.elastic import Elastic, MemberGroup, as_member, finish
from axlearn_like.elastic.member import Member
from axlearn_like.input import SupervisedInput
from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.moe.routing import RoutingLayout
from axlearn_like.learner import Learner
from axlearn_like.operations.memory import check_state_fits
from axlearn_like.operations.utilisation import step_flops
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.signals import graceful_stop
from axlearn_like.tokenizers.embedding import check_tokenizers
from axlearn_like.training.alignment.distillation import DistillationLoss
from axlearn_like.training.alignment.kto import KTO
from axlearn_like.training.alignment.preferences import PreferenceLoss, ReferenceLoss
from axlearn_like.training.alignment.scoring import ScoredStep, Scoring, describe_scored
from axlearn_like.training.head_losses import HeadLoss
from axlearn_like.training.losses import SupervisedLoss
from axlearn_like.training.opening import ended_in_all, open_in_all
from axlearn_like.training.program import (
    TrainProgram,
    Tuning,
    check_length,
    check_rows,
    describe_batch,
    drops_out,
    train_program,
    trainer_programs,
    trainer_tuning,
)
from axlearn_like.training.replicas import Replicas
from axlearn_like.training.session import Session, TrainingConfig
from axlearn_like.training.supervised_updates import SupervisedUpdates
from axlearn_like.training.updates.members import member_programs, summed_step
from axlearn_like.training.updates.spread.spread import check_spread, first_in_host_memory, spread_program
from axlearn_like.training.updates.spread.step import SpreadStep
from axlearn_like.training.updates.zebra.step import ZebraStep
from axlearn_like.training.updates.zebra.zebra import Zebra, first_by_group
from mesh import make_mesh
from mesh.batches import local_rows
from mesh.cost.program import Programs
from mesh.distributed import ProcessGroup
from mesh.files.written import replace_file
from mesh.programs.shared import shared_program
from mesh.rules import use_mesh, use_rules

# Kind of examples that a loss is computed from -> their input.
_INPUTS = {
    "texts": "SupervisedInput",
    "labels": "LabelledInput",
    "pairs": "PreferenceInput",
    "judgements": "UnpairedInput",
}


LossConfig = SupervisedLoss.Config | HeadLoss.Config | PreferenceLoss.Config | KTO.Config | DistillationLoss.Config


class Trainer(Configurable):
    """Trainer of a decoder on packed rows.

    The files on disk decide where `run` begins: with a checkpoint in the run directory it resumes from there, with the
    next batch, and the result is the same to the bit as without the interruption.

    >>> from experiments.demo.config import demo_sft
    >>> cfg = demo_sft(seed=0).set(num_steps=2, evaluators=(), early_stopping=None)
    >>> cfg.check()
    >>> summary = cfg.build().run("runs/two_steps")
    >>> summary["finished"]
    True
    """

    class Config(TrainingConfig["Trainer"]):
        input: SupervisedInput.Config = REQUIRED
        loss: LossConfig = SupervisedLoss.Config()
        mesh_rules: MeshRules = ()  # edits by the devices (mesh_rules.py)
        seed: int = 0  # random seed of initial parameters and dropout
        start_from: StartFrom.Config | None = None  # parameters of another run; None: initialised from `seed`
        replicas: Replicas.Config | None = None  # copies of popular experts, on a mesh with an axis expert; None: none
        elastic: Elastic.Config | None = None  # processes that come and go, each with a mesh of its own; None: none do
        zebra: Zebra.Config | None = None  # experts on devices of their own; None: on those of `mesh`, as all else

        @property
        def first_params(self) -> StartFrom.Config | None:
            """The source of the first parameters: `start_from`, or the model's own."""
            return self.start_from or pretrained_source(self.model)

        def check(self) -> None:
            """Refuse, too, rows longer than the model's positions, and ids that it has no embedding for.

            `check_sizes` looks at the devices.
            """
            super().check()
            check_length(self.model, self.input.seq_len, f"{path_of(self.input)}.seq_len", path_of(self.model))
            check_tokenizers(self.input, self.model)
            expected = f"a {_INPUTS[self.loss.contents]}.Config, as loss is {type(self.loss).__qualname__}"
            for data in (self, *self.evaluators):
                given = getattr(data, "input", self.input)
                data.require("input", given.contents == self.loss.contents, expected)
            if self.replicas is not None:
                self.require("replicas", not self.loss.scores, "None with a loss that scores batches by other policies")
            if self.elastic is not None:
                self.elastic.check_trainer(self, drops_out(self.model))
                if self.elastic.experts is not None:
                    check_spread(self)
            if self.zebra is not None:
                self.zebra.check_trainer(self)

        def check_sizes(self, devices: Sequence[Any] | None = None) -> Mesh:
            """Return the mesh of these devices, or of this process's, if rows divide over it (UserError).

            With `zebra` that of attention's devices.
            """
            if self.zebra is not None:
                self.zebra.check_trainer(self)
                meshes = self.zebra.divide(self.mesh, devices)
                self.zebra.settled(self, meshes)
                return meshes[0]
            mesh = make_mesh(self.mesh, devices, slices=self.slices)
            if self.elastic is not None:
                self.elastic.check_mesh(mesh)
            with use_rules(self.axis_rules):
                if self.elastic is None:
                    check_rows(self.input, mesh, self.microbatches)
                else:
                    check_rows(self.input, mesh, self.elastic.parts, "parts (elastic.parts)")
            return mesh

        def program(self, mesh: Mesh, learner: Learner | None = None) -> TrainProgram:
            """Return the train step on a mesh; the learner is built unless it is given."""
            if self.zebra is not None:
                return self.zebra.program(self, mesh, learner or self.learner.build())
            settings: dict[str, Any] = {
                "microbatches": self.microbatches,
                "compiler_options": self.compiler_options,
                "seed": self.seed,
            }
            rows = self.input.batch_size, self.input.seq_len
            key = ("train", config_key((self.model, self.loss, self.learner, self.axis_rules, settings, rows)), mesh)

            def make() -> TrainProgram:
                loss, optimizer = self.loss.build(), learner or self.learner.build()
                return train_program(self.model, self.input, loss, optimizer, mesh, **settings)

            with use_rules(self.axis_rules):
                return shared_program(key, make)

        def batch(self, mesh: Mesh) -> dict[str, Any]:
            """Return the described batch that the step takes; the mesh is set."""
            batch = describe_scored(describe_batch(self.input, mesh), self.loss.scores)
            if self.replicas is None:
                return batch
            layout = self.replicas.check_layout(self.routing_layout, mesh)
            return {**batch, **self.replicas.describe(layout, mesh)}

        @property
        def routing_layout(self) -> RoutingLayout | None:
            """The parts of a record of the model's routing; None: it has no mixtures of one kind."""
            return getattr(build_abstract(self.model), "routing_layout", None)

        def resolved(self) -> ConfigBase["Trainer"]:
            """Return the config with every value that a parent sets filled in; nothing is allocated."""
            return self.clone(model=resolve_model(self.model))

        def commands(self) -> tuple[str, ...]:
            """Return the commands that run such an experiment, the usual one first."""
            return ("train",)

        def programs(self, devices: Sequence[Any]) -> Programs:
            """Describe what the trainer can run on these devices: train and eval; of a member of a run also update."""
            self.require("zebra", self.zebra is None, "None, to compile the step as one program")
            return (trainer_programs if self.elastic is None else member_programs)(self, devices)

        def tuning(self) -> Tuning:
            """Return the fields that change the memory and speed of the train step, but not its result."""
            return trainer_tuning(self)

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._mesh = cfg.check_sizes()
        self._learner: Learner = cfg.learner.build()
        self._group = ProcessGroup("trainer")
        self._member: Member | None = None  # membership of this process among those of `elastic`

    def run(
        self,
        run_dir: str | Path | RunDirectory,
        *,
        progress: bool = True,
        began: float | None = None,
        force: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Train until `num_steps`, or until SIGTERM, Ctrl-C or `stop()`; then save and return.

        Args:
            run_dir: path or URL, opened (and locked) here, or an open run directory.
            progress: show a bar or lines, and at the end where the time went, on stderr.
            began: unix time from which on the time is this run's; None: now.
            force: resume a run of another config (see `RunDirectory.open`).
            stop: True in one process ends the run after the current update.

        Returns:
            The last metrics row, with `finished`: False if the run was asked to stop. Of a run that had ended before,
            with `before`: its newest checkpoint is verified, and nothing is written.

        Raises:
            RunDirectoryError, CheckpointError, InputError: see there. RecompilationError: a batch of another shape.
            CorruptionError: a repeated step gave other bits.
        """
        self._cfg.check()
        with use_mesh(self._mesh, self._cfg.axis_rules), as_member(self._cfg.elastic) as self._member:
            program = self._checked_program()
            if self._member is not None:
                path = run_dir.path if isinstance(run_dir, RunDirectory) else run_dir
                run_dir, self._group = RunDirectory.attach(path), MemberGroup(self._member)
            if isinstance(run_dir, RunDirectory):
                return self._run(run_dir, program, progress, began, stop)
            self._check_start(RunDirectory.attach(run_dir), program)
            with open_in_all(run_dir, to_text(self._cfg), self._group, force=force) as run:
                if progress and self._group.leader:
                    print(f"run directory: {run.where}", file=sys.stderr)
                if (row := ended_in_all(run, self._cfg, self._group, show=progress)) is not None:
                    return row
                return self._run(run, program, progress, began, stop)

    def _checked_program(self) -> TrainProgram:
        """Trace the step once, before anything on disk is changed: what does not fit is refused now."""
        cfg = self._cfg
        program = cfg.program(self._mesh, self._learner)
        scoring = self._scoring(program)
        held = {} if scoring is None else scoring.reference.memory(program.state["params"])
        frozen = self._learner.frozen(program.state["params"])
        if isinstance(program.step, ZebraStep):
            program.step.check(program.state, cfg.batch(self._mesh))
            return program
        if cfg.elastic is None or cfg.elastic.experts is None:  # else no member has all of the state
            check_state_fits({**program.state, **held}, self._mesh, frozen)
        jax.eval_shape(program.step, program.state, cfg.batch(self._mesh))  # jax keeps the trace
        return program

    def _scoring(self, program: TrainProgram) -> Scoring | None:
        """Return the loss with the policy that it compares with, None if it does not (ConfigError: it does not fit)."""
        loss, params = self._cfg.loss, program.state["params"]
        if not loss.scores:
            return None
        assert isinstance(loss, ReferenceLoss.Config | KTO.Config | DistillationLoss.Config), "these have scores"
        frozen = self._learner.frozen(params)
        loss.reference.check_policy(self._cfg.model, params, frozen)
        reference = loss.reference.build(frozen=frozen)
        return Scoring(loss.build(), reference, program.graphdef, self._cfg.microbatches)

    def _check_start(self, run_dir: RunDirectory, program: TrainProgram) -> None:
        """Refuse parameters of another model before there is a run that would start from them."""
        begun = run_dir.config_path.exists()  # run may have a checkpoint by now
        start = self._cfg.first_params
        if start is not None and not begun:
            start.build().check(program.state["params"])

    def _run(
        self, run: RunDirectory, program: TrainProgram, show: bool, began: float | None, stopped: Callable[[], bool]
    ) -> dict[str, Any]:
        cfg, group = self._cfg, self._group
        if group.leader:
            replace_file(run.resolved_config_path, to_text(self._cfg.resolved()))
        where: dict[str, Any] = {"phase": "sft", "checkpoints": run.checkpoints}
        with graceful_stop() as stop, Session(cfg, run, self._mesh, group, **where, began=began) as session:
            known = session.peak and cfg.zebra is None  # no MFU over two kinds of devices
            flops = step_flops(cfg.model, cfg.input.batch_size, cfg.input.seq_len) if known else None
            source = SupervisedUpdates(cfg.input.build(rows=local_rows(cfg.input.batch_size)), flops)
            if cfg.replicas is not None:
                here = {"layout": cfg.routing_layout, "mesh": self._mesh, "events": session.events}
                source.replicas = cfg.replicas.build(**here)
            session.callback(source.close)
            if cfg.elastic is not None:
                program = self._elastic_program(session, program)
                source.whole = True
            start = cfg.first_params.build().params if cfg.first_params else None
            scoring = self._scoring(program)
            reference = None if scoring is None else scoring.reference
            also = None if reference is None else reference.describe(program.state["params"])
            begin: dict[str, Any] = {"seed": cfg.seed, "params": start, "also": also, **self._begun(program, start)}
            state, step, extras = session.restore_or_start(program, self._learner, **begin)
            if reference is not None:
                reference.start(state["params"]) if extras is None else reference.restore(state)
            if extras is not None:
                source.restore(extras)
            if isinstance(program.step, SpreadStep | ZebraStep):
                state = program.step.parted(state)
            if isinstance(program.step, ZebraStep):
                source.saved_as = program.step.whole
                told = cfg.zebra.told(cfg, program.step.meshes) if cfg.zebra else {}
                session.events.append("trainer", "zebra_began", **told)
                if show and told.get("plan"):
                    print(f"zebra: {told['plan']}", file=sys.stderr)
            loss = scoring or cfg.loss.build()
            if scoring is not None:
                program = program._replace(step=ScoredStep(program.step, scoring))
            source.reference = reference
            session.tiers.hold(step, partial(source.checkpoint, state))
            loop = session.loop(state, step, program, source, self._learner, loss, show=show)
            del state  # the loop's alone: the step donates it
            member = self._member
            done = loop.run(
                lambda: (
                    group.any(stop.requested or stopped() or run.is_cut_off())
                    or (member is not None and member.ends_after(loop.step))
                )
            )
            if member is not None and (done or member.ends_after(loop.step)):
                finish(member, loop)
            session.end(loop.step, "done" if done else stop.reason or "another process", show=show)
            return (loop.log.rows[-1] if loop.log.rows else {}) | {"step": loop.step, "finished": done}

    def _begun(self, program: TrainProgram, start: Any) -> dict[str, Any]:
        """Return how the first state is made, where one program does not make it."""
        if isinstance(program.step, ZebraStep):
            return {"params": start or first_by_group(program, self._cfg.seed), "begin": program.step.begin}
        if isinstance(program.step, SpreadStep):
            return {"begin": partial(first_in_host_memory, learner=self._learner, rules=self._cfg.axis_rules)}
        return {}

    def _elastic_program(self, session: Session, program: TrainProgram) -> TrainProgram:
        """Return the program whose step is that of members of a run."""
        cfg = self._cfg
        assert cfg.elastic is not None
        if cfg.elastic.experts is not None:
            return spread_program(cfg, program, self._learner, self._member, (session.tiers, session.events))
        summed = session.guarded(summed_step(cfg, program, self._learner))
        here = {"tiers": session.tiers, "described": (program.state, cfg.batch(self._mesh))}
        return program._replace(step=cfg.elastic.step(summed, self._member, **here))


def resolve_model(model: ConfigBase) -> ConfigBase:
    """Return a model's config as its layers get it (`dim`, `vocab_size` ...), from an abstract build."""
    return resolve(model, build_abstract)
