"""A training session: the operations around the updates of a run, the same for supervised and policy training."""

import contextlib
import copy
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.interval import INTERVAL_EVENTS, chosen_interval
from axlearn_like.checkpoint.tiers import CheckpointTiers, Held
from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.elastic.update import MemberStep
from axlearn_like.layers.base import first_params
from axlearn_like.layers.parameter_names import merged, without
from axlearn_like.learner import Learner
from axlearn_like.operations.goodput import ACCOUNTED, CauseClock, account
from axlearn_like.operations.profiler import Profiler
from axlearn_like.operations.recompilation import CompiledStep
from axlearn_like.operations.sdc import SDCCheck
from axlearn_like.operations.step_metrics import StepLog, StepMetrics
from axlearn_like.operations.utilisation import peak_flops
from axlearn_like.operations.watchdog import Watchdog
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog, span
from axlearn_like.run.metrics import MetricsWriter, newest_rows, read_rows
from axlearn_like.run.progress import Progress
from axlearn_like.training.alignment.scoring import ScoredStep
from axlearn_like.training.early_stopping import EarlyStopping
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.loop import TrainingLoop, UpdateSource
from axlearn_like.training.losses import Loss
from axlearn_like.training.opening import print_account
from axlearn_like.training.program import TrainProgram
from axlearn_like.training.step import AccumulatedStep, HeldStep, State, init_state
from axlearn_like.training.updates.minibatches import MinibatchStep
from axlearn_like.training.updates.zebra.step import ZebraStep
from mesh.devices import compilers
from mesh.distributed import ProcessGroup
from mesh.rules import AxisRules, check_rules

_NO_FILE = re.compile(r"[\w.,:+-]*", re.ASCII)  # a value without a path
_FILE_OPTION = re.compile(r"dump|dir|path|file|_to$|_from$|extra")  # names of options with files as values


class TrainingConfig[T](ConfigBase[T]):
    """Fields of every trainer: model, learner, mesh and operations."""

    model: ConfigBase = REQUIRED
    learner: Learner.Config = REQUIRED
    checkpoint: Checkpointer.Config = Checkpointer.Config()
    mesh: dict[str, int] = {}  # axis -> size, over all processes; absent axes have size 1, one may be -1
    slices: dict[str, int] = {}  # axis -> the factor of its size over slices; empty: all go over the first axis
    axis_rules: AxisRules = {}  # logical axis -> mesh axes, where not mesh.rules.DEFAULT_RULES
    compiler_options: dict[str, str] = {}  # XLA options of the train step; set by a mesh rule, as TPUs have their own
    microbatches: int = 1
    num_steps: int = REQUIRED
    early_stopping: EarlyStopping.Config | None = None  # rule that ends training early; None: all steps are made
    log_every: int = 10
    evaluators: tuple[ConfigBase, ...] = ()
    keep_best: KeepBest.Config | None = None  # checkpoints kept besides the newest
    writers: tuple[ConfigBase, ...] = ()  # writers of metrics, besides metrics.jsonl (operations/writers.py)
    max_compilations: int | None = None  # batch shapes that the step may be compiled for; None: one, or all of RL's
    watchdog: Watchdog.Config | None = Watchdog.Config()
    profile: Profiler.Config = Profiler.Config()
    sdc_check: SDCCheck.Config | None = None  # repetition of steps to find silent data corruption; None: off
    peak_flops: float | None = None  # FLOP/s of one device, for MFU; None: by its kind, where that is known

    def reaches(self) -> tuple[str, ...]:
        """Return the options of the compiler that may name files."""
        named = ((name, str(value)) for name, value in self.compiler_options.items())
        return tuple(
            f"xla:{name}={value}" for name, value in named if _FILE_OPTION.search(name) or not _NO_FILE.fullmatch(value)
        )

    def check_fields(self) -> None:
        """Refuse counts below 1, and evaluators of averaged parameters where nothing is averaged."""
        self.require_least(1, "num_steps", "log_every", "microbatches", "max_compilations")
        with self.errors_in("axis_rules"):
            check_rules(self.axis_rules, "axis_rules")
        for evaluator in self.evaluators:
            if isinstance(evaluator, LossEvaluator.Config) and self.learner.ema is None:
                evaluator.require("averaged", not evaluator.averaged, "False while learner.ema is None")


class Session(contextlib.ExitStack):
    """One process's operations: clock, checkpoints, watchdog, profiler, metrics. Leaving it closes them, last first."""

    def __init__(
        self,
        cfg: TrainingConfig[Any],
        run: RunDirectory,
        mesh: Mesh,
        group: ProcessGroup,
        *,
        phase: str,
        checkpoints: Path,
        began: float | None = None,
    ):
        """Open the operations; nothing is restored or compiled yet.

        Args:
            group: the processes of the trainer; the leader writes logs and keeps the best checkpoints.
            began: unix time from which on time is charged to this session; None: now.
        """
        super().__init__()
        self._cfg, self._run, self._mesh, self._group, self._phase = cfg, run, mesh, group, phase
        self.events = EventLog(run.events_path, silent=lambda: not group.leader)
        self.clock = self.enter_context(CauseClock(self.events, began=began))
        checkpointer = cfg.checkpoint.build(directory=checkpoints)
        self.callback(checkpointer.close)
        best = cfg.keep_best.build(directory=checkpoints) if cfg.keep_best and group.leader else None
        self.tiers = CheckpointTiers(checkpointer, best, self.events)
        self.callback(self.tiers.close)
        here = {"run_dir": run.path, "events": self.events}
        self.peak = cfg.peak_flops or peak_flops(list(mesh.devices.flat))  # FLOP/s of one device, if known
        self._beat: Callable[[int], None] = lambda step: None
        if cfg.watchdog:
            self._beat = self.enter_context(cfg.watchdog.build(**here, doing=lambda: self.clock.cause)).beat
        self._profiler = self.enter_context(cfg.profile.build(**here))  # early: its signal would end the process

    def restore_or_start(
        self,
        program: TrainProgram,
        learner: Learner,
        *,
        seed: int,
        params: Callable[[Any], Any] | None = None,
        also: State | None = None,
        held: Held | None = None,
        begin: Callable[[Any], State] | None = None,
    ) -> tuple[State, int, dict[str, Any] | None]:
        """Return state, step and extras of the newest checkpoint; without one a new state, 0 and None.

        Args:
            program: describes the state.
            params: maps abstract parameters to the initial ones; None: they are initialised from `seed`.
            also: further described arrays of a checkpoint.
            held: the frozen parameters, if they are there already: the state has them as they are.
            begin: makes the first state of parameters; None: one program does.
        """
        frozen = learner.frozen(program.state["params"])
        self.tiers.freeze(frozen, held)
        latest = self._group.broadcast(self.tiers.latest_step())
        self.tiers.choose(self._group.broadcast(chosen_interval(read_rows(self._run.events_path, INTERVAL_EVENTS))))
        if latest is not None:
            state, extras = self.tiers.restore({**program.state, **(also or {})}, latest)
            return state, latest, extras
        shardings = jax.tree.map(lambda a: a.sharding, program.state)
        if held is not None:
            moving = lambda params: without(params, frozen)  # noqa: E731
            state = {**shardings, "params": moving(shardings["params"])}

            def adopt(params: Any, base: Any) -> State:
                whole = init_state(merged(base, params), learner)
                return {**whole, "params": moving(whole["params"])}

            first = first_params(program.init, seed, moving(program.state["params"]), moving)
            state = jax.jit(adopt, out_shardings=state, donate_argnums=0)(first, held.params)
            return {**state, "params": merged(held.params, state["params"])}, 0, None
        params = params or partial(first_params, program.init, seed)
        if begin is not None:
            return begin(params(program.state["params"])), 0, None
        begin = jax.jit(lambda params: init_state(params, learner), out_shardings=shardings, donate_argnums=0)
        return begin(params(program.state["params"])), 0, None

    def loop(
        self,
        state: State,
        step: int,
        program: TrainProgram,
        source: UpdateSource,
        learner: Learner,
        loss: Loss,
        *,
        show: bool = False,
    ) -> TrainingLoop:
        """Return the loop from `step` on; the start is over, and is logged.

        Args:
            state: given away: the step donates it.
            step: completed updates.
            program: the step, and the model's graph definition for evaluators.
            source: batches, and what follows an update.
        """
        cfg = self._cfg
        self.events.append("trainer", "train_begin", step=step, began=round(self.clock.began, 3), **compilers())
        self.clock.start(step)
        seen = program.step.gathered if isinstance(program.step, ZebraStep) else lambda state: state
        evaluators = [evaluator.build(graphdef=program.graphdef, loss=loss) for evaluator in cfg.evaluators]
        for evaluator in evaluators if step == 0 else ():
            if getattr(evaluator, "before", False):
                with self.clock.spending("evaluation"), span(self.events, "trainer", "evaluated_before") as fields:
                    fields.update(evaluator.run(seen(state)["params"], 0))
                self._beat(0)
        rows_kept = cfg.early_stopping.rows + 1 if cfg.early_stopping else 1
        return TrainingLoop(
            state=state,
            step=step,
            num_steps=cfg.num_steps,
            log_every=cfg.log_every,
            step_fn=self.guarded(program.step, cfg.max_compilations or 1),
            source=source,
            log=self._log(step, rows_kept, show and self._group.leader, source.tokens),
            clock=self.clock,
            tiers=self.tiers,
            evaluators=evaluators,
            averaged=jax.jit(learner.ema_params),
            profiler=self._profiler,
            sdc_check=cfg.sdc_check.build(mesh=self._mesh) if cfg.sdc_check else None,
            reached=self._reached(),
            beat=self._beat,
            seen=seen,
        )

    def end(self, step: int, reason: str, *, show: bool = False) -> None:
        """Log the end of the session after `step` updates; print where the time went if `show`."""
        self.clock.flush()
        self.events.append("trainer", "train_end", step=step, reason=reason)
        if show and self._group.leader:
            print_account(self._run)

    def _reached(self) -> Callable[..., bool]:
        """Return the rule of early stopping, by which the leader decides for all processes."""
        if self._cfg.early_stopping is None:
            return lambda rows, before: False
        rule = self._cfg.early_stopping.build()
        return lambda rows, before: self._group.broadcast(self._group.leader and rule(rows, before))

    def guarded(self, step: Any, allowed: int = 1) -> Any:
        """Return the step as programs that are compiled for so many shapes of batches and no more."""
        if isinstance(step, ZebraStep):
            return self._charged(step)
        if isinstance(step, MemberStep):
            return step
        if isinstance(step, MinibatchStep | ScoredStep):
            step.step = self.guarded(step.step, allowed)
            return step
        if not isinstance(step, AccumulatedStep | HeldStep):
            return CompiledStep(step, allowed=allowed, around=self._compiling)
        guarded: Any = copy.copy(step)  # the step itself may be that of other trainers too (`shared_program`)
        if isinstance(step, HeldStep):
            guarded.step = CompiledStep(step.step, allowed=allowed, around=self._compiling)
        else:
            guarded.accumulate = CompiledStep(step.accumulate, allowed=allowed, around=self._compiling)
            guarded.update = self.guarded(step.update, 1)
        return guarded

    def _charged(self, step: ZebraStep) -> Any:
        """Return the step, the first call of which compiles its many programs, and is charged so."""
        calls = itertools.count()

        def run(state: State, batch: Any) -> Any:
            with self._compiling() if next(calls) == 0 else contextlib.nullcontext():
                return step(state, batch)

        return run

    def _log(self, start: int, rows_kept: int, show: bool, tokens: str) -> StepLog:
        cfg, leader = self._cfg, self._group.leader
        writer = MetricsWriter(
            self._run.path, phase=self._phase, resume_step=start, silent=lambda: not self._group.leader
        )
        self.callback(writer.close)
        others = [other.build(run_dir=self._run.path, resume_step=start) for other in (cfg.writers if leader else ())]
        for other in others:
            self.callback(other.close)
        progress = self.enter_context(Progress(cfg.num_steps, start=start)) if show else None
        devices = list(self._mesh.devices.flat)
        past = account(read_rows(self._run.events_path, ACCOUNTED))
        metrics = StepMetrics(self.clock, past, devices, peak=self.peak)
        rows = newest_rows(self._run.metrics_path, self._phase, count=rows_kept)
        return StepLog(writer, others, progress, metrics, start, deque(rows, maxlen=rows_kept), tokens=tokens)

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[dict[str, Any]]:
        """Charge and log a compilation."""
        with self.clock.spending("compile"), span(self.events, "trainer", "compile") as fields:
            yield fields
