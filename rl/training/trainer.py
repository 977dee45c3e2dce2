"""The policy trainer: takes whole batches from the controller, updates, publishes.

The order of things, so that a trainer may die between any two of them: publish version s, take batch s, update, mark
batch s as consumed, publish s + 1, save. After a restart the restored version is published *before* data is asked for.

It may be several processes that share one mesh. All run this code; the first, the leader, decides what is next and
speaks for all with the controller and in the log. Each pushes its own part of the weights.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache, partial
from types import TracebackType
from typing import Any

from jax.sharding import Mesh

from axlearn_like.checkpoint.tiers import Held
from axlearn_like.config import Configurable, replace
from axlearn_like.kernels.exact.scope import numerics_of
from axlearn_like.layers.base import build_abstract, refuse_inexact
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.layers.wrappers.shared_base import held_of
from axlearn_like.learner.schedules import GivenRate
from axlearn_like.operations.memory import check_state_fits
from axlearn_like.operations.utilisation import row_flops
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.alignment.reference import Reference
from axlearn_like.training.loop import TrainingLoop
from axlearn_like.training.losses import SupervisedLoss
from axlearn_like.training.program import TrainProgram
from axlearn_like.training.session import Session
from axlearn_like.training.step import State, Step, at_rate, program_of
from axlearn_like.training.updates.minibatches import MinibatchStep
from axlearn_like.training.updates.programs import StepProgram
from mesh.distributed import ProcessGroup
from mesh.programs.background import in_background
from mesh.rules import use_mesh
from rl.objective import NegativeReward, Objective
from rl.protocol.protocols import ReferenceSource
from rl.training.config import PolicyTrainingConfig
from rl.training.critic.values import RolloutValues
from rl.training.publication import Publication
from rl.training.scoring.logprob_diff import LogprobDiff, difference_bounds
from rl.training.scoring.reference_scores import ReferenceScores, RemoteReference, TrainersReference
from rl.training.scoring.reference_states import ReferenceStates
from rl.training.spec import DrawingPolicy, FirstVersion, TrainerServices
from rl.training.steps.ahead import compile_updates
from rl.training.steps.fill import FillStep
from rl.training.steps.inputs import InputsStep
from rl.training.steps.observers import CriticUpdates, LogprobComparison
from rl.training.steps.policy_updates import PolicyUpdates, Steps
from rl.training.steps.score import ScoreStep
from rl.training.steps.take import TakeStep

_EVALUATION_POLL = 0.2  # seconds between two questions for the end of the last evaluation


class PolicyTrainer(Configurable):
    """One update a batch, on a named mesh, in the loop and with the operations of supervised training."""

    class Config(PolicyTrainingConfig["PolicyTrainer"]):
        pass

    def __init__(
        self,
        cfg: Config,
        *,
        run: RunDirectory,
        services: TrainerServices,
        first: FirstVersion | None = None,
        processes: ProcessGroup | None = None,
        drawing: DrawingPolicy | None = None,
        devices: Sequence[Any] | None = None,
    ):
        """Restore the newest checkpoint, or start by `first`; `drawing`: as engines do; `devices`: None: all."""
        controller, weights, reference = services.controller, services.weights, services.reference
        assert (reference is None) == (cfg.reference_devices is None), "the runtime starts the role, or there is none"
        first, drawing = first or FirstVersion(), drawing or DrawingPolicy()
        if first.base is not None:  # engines multiply by an adapter beside its base, and so do updates
            cfg = cfg.clone()
            replace(cfg.model, LoRA.Config, lambda layer: layer.set(separate=True))
        self.cfg, self._group = cfg, processes or ProcessGroup("trainer")
        self._controller = controller
        self.finished = False  # the last version is made and, if asked for, evaluated
        self._mesh, objective = cfg.check_sizes(devices), cfg.build_objective()
        refuse_inexact(cfg.model, self._mesh.devices.flat[0].platform)
        learner, where = cfg.build_learner(), {"phase": "rl", "checkpoints": run.checkpoints / "rl"}
        with use_mesh(self._mesh, self.cfg.axis_rules):
            self._session = Session(cfg, run, self._mesh, self._group, **where)
            self._session.tiers.memory = services.states
            program = cfg.program(self._mesh, learner) if first.base is None else self._shared_program()
            self._shared = None if first.base is None else program_of(program.step)
            updates = None if cfg.updates is None else cfg.updates.build(seed=first.seed)
            until: dict[str, Any] = {} if updates is None else {"until": updates.too_far}
            program = program._replace(step=MinibatchStep(program.step, **until))
            frozen = learner.frozen(program.state["params"])
            held = None
            if cfg.reference is not None and reference is None:
                held = cfg.reference.build(frozen=frozen)
            critic = cfg.build_critic(program.graphdef)
            self._publication = Publication(
                *(cfg, weights, controller, self._group, EventLog(run.events_path)),
                frozen=frozen,
                unrounded=frozenset(build_abstract(cfg.model).unrounded_paths()),
                drawing=dataclasses.replace(drawing, has_base=first.base is not None),
            )
            start: dict[str, Any] = {"seed": first.seed, "params": first.initial}
            if first.base is not None:
                cfg.require("processes", self._group.count == 1, "1 with a base that several policies share")
                start["held"] = Held(held_of(first.base, program.state["params"], frozen), first.beside)
            begin = partial(self._session.restore_or_start, program, learner, **start)
            state, step = self._restore(begin, program, held, critic, frozen)
            graph = None if held is None else held.graphdef
            dtype = getattr(cfg.model, "dtype", "float32")
            self.diff = self._make_diff(program, graph, difference_bounds(dtype, weights.codec, drawing.approximations))
            scores = _reference_scores(cfg, program.graphdef, held, reference, self.diff)
            source = self._make_source(objective, updates=updates, reference=held, scores=scores, critic=critic)
            if cfg.keeps_best_by_evaluation:
                self._session.tiers.expect_values(lambda step: cfg.evaluates(step) or ends_early(cfg, run, step))
            loss = SupervisedLoss.Config(chunks=cfg.chunks).build()  # loss of evaluators on supervised data
            self._loop = self._session.loop(state, step, program, source, learner, loss)

    def _shared_program(self) -> TrainProgram:
        """Return a program that policies at other learning rates share."""
        learner = self.cfg.learner
        program = self.cfg.clone(learner=learner.clone(schedule=GivenRate.Config())).program(self._mesh)
        return program._replace(step=at_rate(program.step, learner.schedule.build()))

    def _restore(
        self,
        begin: Callable[..., Any],
        program: TrainProgram,
        reference: Reference | None,
        critic: RolloutValues | None,
        frozen: frozenset[str],
    ) -> tuple[State, int]:
        """Return the newest or first state, its step, and the parts beside it; `begin` restores or starts these."""
        params = program.state["params"]
        held = {} if reference is None else reference.describe(params)
        memory = {} if reference is None else reference.memory(params)
        if critic is not None:
            held, memory = {**held, **critic.describe()}, {**memory, **critic.describe()}
        check_state_fits({**program.state, **memory}, self._mesh, frozen)
        state, step, extras = begin(also={"recent": self._publication.describe(params), **held})
        if extras is not None:
            self._publication.restore(state.pop("recent"), extras["versions"], state["params"])
            self._publication.pool = extras.get("pool")
        for part in (reference, critic):
            if part is not None:
                part.start(state["params"]) if extras is None else part.restore(state)
        return state, step

    def _make_diff(self, program: TrainProgram, reference: Any, bounds: dict[str, float]) -> LogprobDiff:
        """Return the comparison of this trainer's log-probabilities with those of the sampler and the reference."""
        cfg = self.cfg
        return LogprobDiff(
            *(program.graphdef, cfg.spec(), cfg.padded_rows(), self._group, bounds),
            reference=reference,
            another_model=cfg.reference is not None and cfg.reference.another_model,
            numerics=numerics_of(cfg.model),
        )

    def _make_source(self, objective: Objective, **parts: Any) -> PolicyUpdates:
        """Return the source of updates, on the mesh in place; `parts`: updates, reference, scores, critic or None."""
        cfg, layout, take = self.cfg, self.cfg.layout(), TakeStep(self._controller, self._group)
        updates, scores, critic = (parts[name] for name in ("updates", "scores", "critic"))
        compared = objective.needs_reference or objective.needs_exact_kl
        flops = {"row_flops": lru_cache(partial(row_flops, cfg.model))} if self._session.peak else {}
        steps = Steps(
            take,
            ScoreStep(take, objective, layout, self.diff, cfg.correct_threshold, updates, scores, critic),
            FillStep(layout, cfg.columns(), scores if compared else None, **flops),
            InputsStep(
                cfg.packing is not None,
                1 if updates is None else updates.epochs,
                self.diff.logprobs if objective.needs_old else None,
            ),
        )
        comparison = LogprobComparison(self.diff, self._publication, cfg.logprob_diff_every)
        return PolicyUpdates(
            *(steps, self._publication, self._session.events),
            observers=[comparison] if critic is None else [CriticUpdates(critic), comparison],
            beside=[part for part in (parts["reference"], critic) if part is not None],
            scores=scores,
            on_update=self.offer_evaluated,
        )

    @property
    def state(self) -> State:
        """The train state."""
        return self._loop.state

    @property
    def mesh(self) -> Mesh:
        """The mesh of its devices."""
        return self._mesh

    @property
    def loop(self) -> TrainingLoop:
        """The loop over its updates."""
        return self._loop

    @property
    def shared(self) -> StepProgram | None:
        """The program of its updates if those of other trainers may run with them in a loop, else None."""
        loop = self._loop
        alone = self._shared is None or not self._shared.loops or loop.sdc_check is not None
        return None if alone or not isinstance(loop.step_fn, MinibatchStep) else self._shared

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of what its loop does."""
        return use_mesh(self._mesh, self.cfg.axis_rules)

    @property
    def step(self) -> int:
        """Completed updates, which is the version of the weights."""
        return self._loop.step

    def watch(self, around: Callable[[Step], Step]) -> None:
        """Call another function for each update: what `around` makes of the step, and calls it once."""
        self._loop.step_fn = around(self._loop.step_fn)

    def done(self) -> bool:
        """Return True if no update is left to make."""
        return self._loop.finished()

    def compile_ahead(self, *, groups: int, samples: int, sure: bool) -> None:
        """Begin to compile, while the first rollouts are drawn: the updates, and the comparison with the sampler.

        Not in several processes, or where other trainers share the program.

        Args:
            groups: prompts of a batch.
            samples: rollouts of each.
            sure: all updates have one shape. Others are not compiled ahead on CPUs, which have no time to spare.
        """
        cfg, step, state, mesh = self.cfg, self._loop.step_fn, self.state, self._mesh
        if self._group.count > 1 or self._shared is not None or not isinstance(step, MinibatchStep):
            return
        wanted = sure or (cfg.packing is not None and mesh.devices.flat[0].platform != "cpu")
        batches = list(cfg.batches(mesh, groups=groups, samples=samples).values()) if wanted else []
        rows = {k: v for k, v in cfg.rows(mesh, groups=groups, samples=samples).items() if k != "temperature"}

        def updates() -> None:
            with self.on_mesh():
                compile_updates(step.step, state, batches, mesh)

        def comparison() -> None:
            with self.on_mesh():
                self.diff.compile(state["params"], rows, batches)

        in_background(updates)
        in_background(comparison)

    def start(self) -> None:
        """Publish the current version and those that workers may still need; only then ask for data."""
        with use_mesh(self._mesh, self.cfg.axis_rules):
            self._publication.start(self.step, self.state["params"])
            self.offer_evaluated()
            self._session.clock.to("input")  # the first batch is awaited

    def run(self, stop: Callable[[], bool] = lambda: False) -> int:
        """Update until the last step, then await the last evaluation; or until `stop()` in any process. Saves.

        Returns the steps completed. A batch with a reward that the objective does not take ends it with an error, with
        the updates before saved.
        """
        with self:
            self.start()
            with use_mesh(self._mesh, self.cfg.axis_rules):
                with self._saved_if_refused():
                    finished = self._loop.run(lambda: self._group.any(stop()))
                if finished:
                    self._await_evaluation(stop)
            self._end()
        self._group.barrier()  # a process that ends now takes nothing from the others
        return self.step

    def _await_evaluation(self, stop: Callable[[], bool]) -> None:
        """Keep the last version published until the controller has evaluated it; `finished` then says so."""
        self._publication.settle()
        self._tell_end()
        while not self.finished and not self._group.any(stop()):
            if not self.look_evaluated():
                with self._session.clock.spending("evaluation"):
                    time.sleep(_EVALUATION_POLL)
        self.offer_evaluated()

    def look_evaluated(self) -> bool:
        """Look once whether the last version has been evaluated, and publish it again if other roles have restarted.

        Returns True if there is nothing to wait for: it is evaluated (`finished`), or is published again.
        """
        with use_mesh(self._mesh, self.cfg.axis_rules), self._session.clock.spending("evaluation"):
            self.finished = self._group.broadcast(self._group.leader and self._is_evaluated())
            changed = self.finished or self._publication.restart_if_forgotten(self.step, self.state["params"])
            self._tell_end()
            self._loop.beat(self.step)
        return changed

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
        with use_mesh(self._mesh, self.cfg.axis_rules), self._saved_if_refused():
            return self._loop.advance(timeout)

    @contextlib.contextmanager
    def _saved_if_refused(self) -> Generator[None]:
        """Save the updates before a batch with a reward that the objective does not take."""
        try:
            yield
        except NegativeReward:  # raised in every process alike, before the batch changed anything
            self._loop.save()
            self._session.tiers.wait()
            raise

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
            self.wind_up()
            self._end()

    def wind_up(self) -> None:
        """Save, and tell the controller if this is the last version."""
        self.save()
        if self.done():
            self._tell_end()

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


def _reference_scores(
    cfg: PolicyTrainer.Config, own: Any, held: Reference | None, role: ReferenceSource | None, diff: LogprobDiff
) -> ReferenceScores | None:
    """Return what updates take of the reference policy, if there is one; `own`: graph definition of the policy."""
    if role is not None:
        assert cfg.reference is not None, "a fleet's reference role is refused without one"
        return RemoteReference(role, cfg.reference)
    if held is None:
        return None
    objective = cfg.build_objective()
    states = None
    if objective.needs_exact_kl:
        states = ReferenceStates(held.graphdef or own, cfg.chunks, routed=held.graphdef is None)
    return TrainersReference(held, diff, states=states, scored=objective.needs_reference)
