"""The supervised trainer: one config, and one `run` that starts or resumes by itself."""

import contextlib
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.remote import RemoteTier
from axlearn_like.checkpoint.tiers import CheckpointTiers
from axlearn_like.config import REQUIRED, ConfigBase, Configurable, MeshRules, resolve, to_text
from axlearn_like.input import SupervisedInput
from axlearn_like.learner import Learner, LearnerError
from axlearn_like.operations.goodput import CauseClock, account, account_lines
from axlearn_like.operations.profiler import Profiler
from axlearn_like.operations.recompilation import CompiledStep
from axlearn_like.operations.sdc import SDCCheck
from axlearn_like.operations.step_metrics import StepLog, StepMetrics
from axlearn_like.operations.utilisation import peak_flops, step_flops
from axlearn_like.operations.watchdog import Watchdog
from axlearn_like.run.directory import RunDirectory, RunDirectoryError
from axlearn_like.run.events import EventLog, span
from axlearn_like.run.metrics import MetricsWriter, read_rows
from axlearn_like.run.progress import Progress
from axlearn_like.run.signals import Stop, graceful_stop
from axlearn_like.training.early_stopping import EarlyStopping
from axlearn_like.training.loop import TrainingLoop
from axlearn_like.training.losses import SupervisedLoss
from axlearn_like.training.program import Program, check_length, check_rows, train_program
from axlearn_like.training.step import State, init_state
from mesh import UserError, make_mesh
from mesh.batches import local_rows
from mesh.distributed import ProcessGroup


class Trainer(Configurable):
    """Trains a decoder on packed rows.

    What is on disk decides where `run` begins: with a checkpoint in the run directory it goes on
    from there, with the next batch, and the result is the same to the bit as without the
    interruption.
    """

    class Config(ConfigBase["Trainer"]):
        model: ConfigBase = REQUIRED
        input: SupervisedInput.Config = REQUIRED
        learner: Learner.Config = REQUIRED
        loss: SupervisedLoss.Config = SupervisedLoss.Config()
        checkpoint: Checkpointer.Config = Checkpointer.Config()
        mesh: dict[str, int] = {}  # axis -> size, over all processes; absent axes have size 1, one may be -1
        slices: dict[str, int] = {}  # axis -> the factor of its size over slices; empty: all go over the first axis
        mesh_rules: MeshRules = ()  # what changes with the devices (see mesh_rules.py)
        compiler_options: dict[str, str] = {}  # of XLA, for the train step; set by a mesh rule, for TPUs have their own
        microbatches: int = 1
        num_steps: int = REQUIRED
        early_stopping: EarlyStopping.Config | None = None  # None: all steps
        log_every: int = 10
        evaluators: tuple[ConfigBase, ...] = ()
        seed: int = 0  # of the initial parameters
        start_from: StartFrom.Config | None = None  # parameters of another run; None: initialised from `seed`
        keep_best: KeepBest.Config | None = None  # checkpoints kept besides the newest
        remote: RemoteTier.Config | None = None  # where checkpoints are copied to
        writers: tuple[ConfigBase, ...] = ()  # of metrics, besides metrics.jsonl (see operations/writers.py)
        max_compilations: int = 1  # number of batch shapes that the step may be compiled for
        watchdog: Watchdog.Config | None = Watchdog.Config()
        profile: Profiler.Config = Profiler.Config()
        sdc_check: SDCCheck.Config | None = None  # None: steps are not repeated

    def __init__(self, cfg: Config):
        if min(cfg.num_steps, cfg.log_every, cfg.microbatches, cfg.max_compilations) < 1:
            raise UserError(
                "Trainer.Config: expected num_steps, log_every, microbatches and max_compilations >= 1, got "
                f"{cfg.num_steps}, {cfg.log_every}, {cfg.microbatches} and {cfg.max_compilations}"
            )
        self._cfg = cfg
        self._mesh = make_mesh(cfg.mesh, slices=cfg.slices)
        self._learner: Learner = cfg.learner.build()
        self._all = ProcessGroup("trainer")
        for index, evaluator in enumerate(cfg.evaluators):
            if getattr(evaluator, "averaged", False) and cfg.learner.ema is None:
                place = f"Trainer.evaluators.{index}.averaged"
                raise LearnerError(f"{place}: expected Trainer.learner.ema to be set, it is None")
        check_rows(cfg.input, self._mesh, cfg.microbatches)
        check_length(cfg.model, cfg.input.seq_len, "Trainer.Config.input.seq_len")

    def resolved(self) -> Config:
        """The config with every value that a parent hands down filled in; nothing is allocated."""
        return self._cfg.clone(model=resolve_model(self._cfg.model))

    def run(
        self, run_dir: str | Path | RunDirectory, *, progress: bool = True, began: float | None = None
    ) -> dict[str, Any]:
        """Trains until `num_steps`, or until SIGTERM or Ctrl-C; then saves and returns.

        Args:
            run_dir: where; opened (and locked) here unless it is open already.
            progress: whether to show a bar or lines, and at the end where the time went, on stderr.
            began: unix time from which on the time is this run's; None: now.

        Returns:
            The last metrics row, with `finished`: False if the run was asked to stop.

        Raises:
            RunDirectoryError, CheckpointError, InputError: see there. RecompilationError: a batch of another shape.
            CorruptionError: a repeated step gave other bits.
        """
        cfg = self._cfg
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.set_mesh(self._mesh))
            program = self._checked_program()
            if not isinstance(run_dir, RunDirectory):
                self._check_start(RunDirectory.attach(Path(run_dir).expanduser()), program)
                run_dir = stack.enter_context(self._open(run_dir))
            if self._all.leader:
                run_dir.resolved_config_path.write_text(to_text(self.resolved()))
            stop = stack.enter_context(graceful_stop())
            events = EventLog(run_dir.events_path, silent=not self._all.leader)
            clock = stack.enter_context(CauseClock(events, began=began))
            checkpointer = cfg.checkpoint.build(directory=run_dir.checkpoints)
            stack.callback(checkpointer.close)
            where = {"directory": run_dir.checkpoints}
            # One process looks after whole checkpoints; all write their parts of each.
            best = cfg.keep_best.build(**where) if cfg.keep_best and self._all.leader else None
            remote = None
            if cfg.remote and self._all.leader:
                remote = cfg.remote.build(**where, config=to_text(cfg), events=events)
            tiers = CheckpointTiers(checkpointer, best, remote, events)
            stack.callback(tiers.close)
            return self._run(run_dir, program, events, clock, tiers, stop, stack, progress)

    def _checked_program(self) -> Program:
        """Traced once, before anything on disk is changed: what does not fit is refused now. Jax keeps the trace."""
        program = train_program(self._cfg, self._mesh, self._learner)
        jax.eval_shape(program.step, program.state, program.batch)
        return program

    def _check_start(self, run_dir: RunDirectory, program: Program) -> None:
        """Refuse parameters of another model before there is a run that would start from them."""
        begun = run_dir.config_path.exists()  # it may have a checkpoint of its own by now
        if self._cfg.start_from is not None and not begun and self._cfg.remote is None:
            self._cfg.start_from.build().check(program.state["params"])

    def _open(self, path: str | Path) -> RunDirectory:
        """The first process opens and locks it; what keeps it from that is raised in all."""
        error: RunDirectoryError | None = None
        run = RunDirectory.attach(Path(path).expanduser())
        if self._all.leader:
            try:
                run = RunDirectory.open(path, to_text(self._cfg))
            except RunDirectoryError as refused:
                error = refused
        told = self._all.broadcast(None if error is None else str(error))
        if told is not None:
            raise error or RunDirectoryError(told)
        return run

    def _run(
        self,
        run_dir: RunDirectory,
        program: Program,
        events: EventLog,
        clock: CauseClock,
        tiers: CheckpointTiers,
        stop: Stop,
        stack: contextlib.ExitStack,
        show: bool,
    ) -> dict[str, Any]:
        cfg, here = self._cfg, {"run_dir": run_dir.path, "events": events}
        watchdog = cfg.watchdog.build(**here, doing=lambda: clock.cause) if cfg.watchdog else None
        beat = stack.enter_context(watchdog).beat if watchdog else lambda step: None
        profiler = stack.enter_context(cfg.profile.build(**here))  # early: its signal would end the process otherwise
        data: SupervisedInput = cfg.input.build(rows=local_rows(cfg.input.batch_size))
        stack.callback(data.close)
        state, start = self._start(program, tiers, data)
        events.append("trainer", "train_begin", step=start, began=round(clock.began, 3))
        clock.start(start)
        loop = TrainingLoop(
            state=state,
            step=start,
            num_steps=cfg.num_steps,
            log_every=cfg.log_every,
            program=CompiledStep(program.step, allowed=cfg.max_compilations, around=lambda: _compiling(events, clock)),
            data=data,
            log=self._log(run_dir, clock, stack, start, show),
            clock=clock,
            tiers=tiers,
            evaluators=[evaluator.build(graphdef=program.graphdef) for evaluator in cfg.evaluators],
            averaged=jax.jit(self._learner.ema_params),
            profiler=profiler,
            check=cfg.sdc_check.build(mesh=self._mesh) if cfg.sdc_check else None,
            beat=beat,
        )
        del state  # the loop's alone: the step donates it
        when = cfg.early_stopping.build() if cfg.early_stopping else lambda rows, before: False

        def reached(rows: Any, *, before: int) -> bool:
            return self._all.broadcast(when(rows, before=before))

        done = loop.run(reached, lambda: self._all.any(stop.requested))
        clock.flush()
        events.append(
            "trainer", "train_end", step=loop.step, reason="done" if done else stop.reason or "another process"
        )
        if show and self._all.leader:
            print(*account_lines(account(read_rows(run_dir.events_path))), sep="\n", file=sys.stderr, flush=True)
        return (loop.log.rows[-1] if loop.log.rows else {}) | {"step": loop.step, "finished": done}

    def _log(
        self, run_dir: RunDirectory, clock: CauseClock, stack: contextlib.ExitStack, start: int, show: bool
    ) -> StepLog:
        cfg = self._cfg
        writer = MetricsWriter(run_dir.path, phase="sft", resume_step=start, silent=not self._all.leader)
        stack.callback(writer.close)
        chosen = cfg.writers if self._all.leader else ()
        others = [writer.build(run_dir=run_dir.path, resume_step=start) for writer in chosen]
        for other in others:
            stack.callback(other.close)
        progress = stack.enter_context(Progress(cfg.num_steps, start=start)) if show and self._all.leader else None
        past = account(read_rows(run_dir.events_path))
        devices = list(self._mesh.devices.flat)
        peak = peak_flops(devices)
        flops = step_flops(cfg.model, cfg.input.batch_size, cfg.input.seq_len) if peak else None
        figures = StepMetrics(clock, past, devices, flops=flops, peak=peak)
        last = deque(_rows(run_dir), maxlen=cfg.early_stopping.rows + 1 if cfg.early_stopping else 1)
        return StepLog(writer, others, progress, figures, start, last)

    def _start(self, program: Program, tiers: CheckpointTiers, data: SupervisedInput) -> tuple[State, int]:
        """State and step, from the newest checkpoint (the input too) or new."""
        latest = self._all.broadcast(tiers.latest_step())
        if latest is not None:
            state, extras = tiers.restore(program.state, latest)
            data.restore(extras["input"])
            return state, latest
        shardings = jax.tree.map(lambda a: a.sharding, program.state)
        if self._cfg.start_from is None:
            return jax.jit(program.init, out_shardings=shardings)(jax.random.key(self._cfg.seed)), 0
        params = self._cfg.start_from.build().params(program.state["params"])
        begin = jax.jit(lambda params: init_state(params, self._learner), out_shardings=shardings, donate_argnums=0)
        return begin(params), 0


def resolve_model(model: ConfigBase) -> ConfigBase:
    """A model's config as its layers get it (`dim`, `vocab_size` ...), from an abstract build."""
    return resolve(model, lambda cfg: jax.eval_shape(lambda: cfg.build(rngs=nnx.Rngs(0))))


def _rows(run_dir: RunDirectory) -> list[dict[str, Any]]:
    """The rows that earlier sessions of this run wrote."""
    if not run_dir.metrics_path.exists():
        return []
    return [row for row in read_rows(run_dir.metrics_path) if row["phase"] == "sft"]


@contextlib.contextmanager
def _compiling(events: EventLog, clock: CauseClock) -> Iterator[dict[str, Any]]:
    """Tells the event log of a compilation, and the clock."""
    with clock.spending("compile"), span(events, "trainer", "compile") as fields:
        yield fields
