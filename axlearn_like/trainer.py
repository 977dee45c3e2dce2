"""The supervised trainer: one config, and one `run` that starts or resumes by itself."""

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from axlearn_like.checkpoint import Checkpointer
from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.config_resolve import resolve
from axlearn_like.config_text import to_text
from axlearn_like.input import InputError, SupervisedInput
from axlearn_like.layers.base import split
from axlearn_like.learner import Learner
from axlearn_like.losses import make_supervised_loss
from axlearn_like.metrics import MetricsWriter, Progress, read_rows
from axlearn_like.preemption import Stop, graceful_stop
from axlearn_like.run_directory import EventLog, RunDirectory, RunDirectoryError
from axlearn_like.train_step import State, init_state, make_train_step
from mesh import make_mesh, shard_batch, to_named_sharding
from mesh.processes import Processes
from mesh.rules import LOGICAL_AXES


class Evaluator(Protocol):
    """Measures parameters now and then; built by `config.build(graphdef=...)`."""

    every: int  # steps; the last step is always measured

    def run(self, params: Any, step: int) -> dict[str, float]:
        """Scalars for the metrics row of `step`."""
        ...


class StopWhen(Configurable):
    """Ends training early: when the mean of a metric over the last logged rows reaches a value.

    It looks at training metrics only, so what is measured on held-out data stays held out.
    """

    class Config(ConfigBase["StopWhen"]):
        metric: str = "accuracy"
        at_least: float = REQUIRED
        rows: int = 5  # logged rows averaged

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        values = [row[self._cfg.metric] for row in rows if self._cfg.metric in row]
        last = values[-self._cfg.rows :]
        return len(last) == self._cfg.rows and sum(last) / len(last) >= self._cfg.at_least


class Trainer(Configurable):
    """Trains a decoder on packed rows.

    What is on disk decides where `run` begins: with a checkpoint in the run directory it goes on
    from there, with the next batch, and the result is the same to the bit as without the
    interruption.

    Several processes (of jax.distributed) may share the mesh. All call `run`; the first of them decides when it is
    over, and it alone writes, but for the arrays of checkpoints, of which each writes its own.
    """

    class Config(ConfigBase["Trainer"]):
        model: ConfigBase = REQUIRED
        input: SupervisedInput.Config = REQUIRED
        learner: Learner.Config = REQUIRED
        checkpoint: Checkpointer.Config = Checkpointer.Config()
        mesh: dict[str, int] = {}  # axis -> size, over all processes; absent axes have size 1, one may be -1
        microbatches: int = 1
        num_steps: int = REQUIRED
        stop_when: StopWhen.Config | None = None  # None: all steps
        log_every: int = 10
        evaluators: tuple[ConfigBase, ...] = ()
        seed: int = 0  # of the initial parameters

    def __init__(self, cfg: Config):
        if cfg.num_steps < 1 or cfg.log_every < 1 or cfg.microbatches < 1:
            raise ValueError(
                "Trainer.Config: expected num_steps, log_every and microbatches >= 1, got "
                f"{cfg.num_steps}, {cfg.log_every} and {cfg.microbatches}"
            )
        self._cfg = cfg
        self._mesh = make_mesh(cfg.mesh)
        self._check_batch()
        self._learner: Learner = cfg.learner.build()
        self._all = Processes("trainer")

    def resolved(self) -> Config:
        """The config with every value that a parent hands down filled in; nothing is allocated."""
        return self._cfg.clone(model=resolve_model(self._cfg.model))

    def run(self, run_dir: str | Path | RunDirectory, *, progress: bool = True) -> dict[str, Any]:
        """Trains until `num_steps`, or until SIGTERM or Ctrl-C; then saves and returns.

        Args:
            run_dir: where; opened (and locked) here unless it is open already.
            progress: whether to show a bar or lines on stderr.

        Returns:
            The last metrics row, with `finished`: False if the run was asked to stop.

        Raises:
            RunDirectoryError, CheckpointError, InputError: see there.
        """
        with contextlib.ExitStack() as stack:
            if not isinstance(run_dir, RunDirectory):
                run_dir = stack.enter_context(self._open(run_dir))
            if self._all.leader:
                run_dir.resolved_config_path.write_text(to_text(self.resolved()))
            stop = stack.enter_context(graceful_stop())
            stack.enter_context(jax.set_mesh(self._mesh))
            checkpointer = self._cfg.checkpoint.build(directory=run_dir.checkpoints)
            stack.callback(checkpointer.close)
            return self._run(run_dir, checkpointer, stop, stack, progress)

    def _open(self, path: str | Path) -> RunDirectory:
        """The first process opens and locks it; what keeps it from that is raised in all."""
        error: RunDirectoryError | None = None
        run = RunDirectory.attach(Path(path).expanduser())
        if self._all.leader:
            try:
                run = RunDirectory.open(path, to_text(self._cfg))
            except RunDirectoryError as refused:
                error = refused
        told = self._all.share(None if error is None else str(error))
        if told is not None:
            raise error or RunDirectoryError(told)
        return run

    def _run(
        self,
        run_dir: RunDirectory,
        checkpointer: Checkpointer,
        stop: Stop,
        stack: contextlib.ExitStack,
        show: bool,
    ) -> dict[str, Any]:
        cfg, silent = self._cfg, not self._all.leader
        events = EventLog(run_dir.events_path, silent=silent)
        data: SupervisedInput = cfg.input.build()
        graphdef, state, start = self._start(checkpointer, data)
        events.append("trainer", "start", step=start)
        writer = MetricsWriter(run_dir.path, phase="sft", resume_step=start, silent=silent)
        stack.callback(writer.close)
        progress = Progress(cfg.num_steps, start=start) if show and not silent else None
        if progress:
            stack.enter_context(progress)
        evaluators: list[Evaluator] = [e.build(graphdef=graphdef) for e in cfg.evaluators]
        log = _Log(writer, progress, start, _rows(run_dir))
        step_fn = make_train_step(make_supervised_loss(graphdef), self._learner, cfg.microbatches)

        step, reached = start, cfg.stop_when.build() if cfg.stop_when else lambda rows: False

        def finished() -> bool:
            # Rows of earlier steps only: a resumed run then ends where an uninterrupted one does.
            return self._all.share(step >= cfg.num_steps or reached([r for r in log.rows if r["step"] < step]))

        while not finished() and not self._all.any(stop.requested):
            state, metrics = step_fn(state, shard_batch(next(data)))
            step += 1
            checkpointer.check()
            log.add(step, metrics, wanted=step % cfg.log_every == 0 or step == cfg.num_steps)
            due = [e for e in evaluators if step % e.every == 0 or step == cfg.num_steps]
            for evaluator in due:
                log.extend(step, evaluator.run(state["params"], step))
            if checkpointer.should_save(step):
                # The row first: a resume from this checkpoint would never write it again.
                log.flush()
                checkpointer.save(step, state, {"input": data.state()})
        done = finished()
        log.flush()
        checkpointer.save(step, state, {"input": data.state()})
        checkpointer.wait()
        events.append("trainer", "stop", step=step, reason="done" if done else stop.reason or "another process")
        return (log.rows[-1] if log.rows else {}) | {"step": step, "finished": done}

    def _start(self, checkpointer: Checkpointer, data: SupervisedInput) -> tuple[Any, State, int]:
        """Graph definition, state and step, from the newest checkpoint (the input too) or new."""
        graphdef, abstract, init = self._abstract()
        latest = self._all.share(checkpointer.latest_step())
        if latest is None:
            shardings = jax.tree.map(lambda a: a.sharding, abstract)
            state = jax.jit(init, out_shardings=shardings)(jax.random.key(self._cfg.seed))
            return graphdef, state, 0
        state, extras = checkpointer.restore(abstract, latest)
        data.restore(extras["input"])
        return graphdef, state, latest

    def _abstract(self) -> tuple[nnx.GraphDef[Any], State, Any]:
        """The model's graph definition, the abstract state, and the function that makes one."""
        graphdefs: list[nnx.GraphDef[Any]] = []

        def init(key: jax.Array) -> State:
            graphdef, params = split(self._cfg.model.build(rngs=nnx.Rngs(key)))
            graphdefs.append(graphdef)  # static: tracing is all that it needs
            return init_state(params, self._learner)

        abstract = jax.eval_shape(init, jax.random.key(self._cfg.seed))
        return graphdefs[0], to_named_sharding(abstract, self._mesh), init

    def _check_batch(self) -> None:
        cfg = self._cfg
        axes = LOGICAL_AXES["batch"] or ()
        axes = (axes,) if isinstance(axes, str) else axes
        ways = math.prod(self._mesh.shape[axis] for axis in axes)
        rows = cfg.input.batch_size
        if rows % (ways * cfg.microbatches):
            raise InputError(
                f"Trainer.Config.input.batch_size is {rows}; expected a multiple of "
                f"{ways * cfg.microbatches}: {cfg.microbatches} microbatches, each spread over "
                f"{ways} parts of the mesh ({' x '.join(axes)})"
            )


def resolve_model(model: ConfigBase) -> ConfigBase:
    """A model's config as its layers get it (`dim`, `vocab_size` ...), from an abstract build."""
    return resolve(model, lambda cfg: jax.eval_shape(lambda: cfg.build(rngs=nnx.Rngs(0))))


def _rows(run_dir: RunDirectory) -> list[dict[str, Any]]:
    """The rows that earlier sessions of this run wrote."""
    if not run_dir.metrics_path.exists():
        return []
    return [row for row in read_rows(run_dir.metrics_path) if row["phase"] == "sft"]


class _Log:
    """Holds metrics back by one step: reading them at once would make the devices wait."""

    def __init__(
        self,
        writer: MetricsWriter,
        progress: Progress | None,
        start: int,
        rows: list[dict[str, Any]],
    ):
        self._writer, self._progress, self.rows = writer, progress, rows
        self._pending: tuple[int, dict[str, Any], bool] | None = None
        self._now = self._written = (start, time.monotonic())

    def add(self, step: int, metrics: dict[str, jax.Array], *, wanted: bool) -> None:
        self.flush()
        self._pending = (step, dict(metrics), wanted)
        self._now = (step, time.monotonic())

    def extend(self, step: int, scalars: dict[str, float]) -> None:
        """Adds an evaluator's scalars to the row of `step`, which is then written in any case."""
        assert self._pending is not None and self._pending[0] == step
        self._pending = (step, {**self._pending[1], **scalars}, True)

    def flush(self) -> None:
        if self._pending is None:
            return
        (step, metrics, wanted), self._pending = self._pending, None
        values = jax.device_get(metrics)
        if wanted:
            # The loop's period since the last row: with metrics read one step late, the step time.
            (now_step, now), (last_step, last) = self._now, self._written
            self._written = self._now
            seconds = (now - last) / (now_step - last_step)
            row = self._writer.write(step, {**values, "step_seconds": round(seconds, 6)})
            self.rows.append(row)
        if self._progress:
            tokens = float(np.asarray(values["tokens"]))
            self._progress.update(step, loss=float(values["loss"]), tokens=tokens)
