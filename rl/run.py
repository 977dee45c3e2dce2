"""The phases of one RL run: supervised warm start, evaluation, RL, evaluation, summary. Each is resumed, not repeated.

What is done is told by what lies in the run directory: checkpoints of the warm start and of RL, `eval_before.json` and
`eval_after.json`. Nothing else is remembered.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

from axlearn_like.checkpoint.checkpointer import Checkpointer, restore_params, verify_latest
from axlearn_like.config import to_text
from axlearn_like.layers.base import Params
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.disk import DiskFull, raising_disk_full
from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail
from axlearn_like.run.progress import Progress
from axlearn_like.run.signals import Stop, graceful_stop
from axlearn_like.training.program import check_length
from axlearn_like.training.trainer import Trainer
from mesh import UserError, make_mesh
from rl.audit.summary import summarise_run
from rl.experiment import RLExperiment, warm_start_directory

Runtime = Literal["inprocess", "ray"]
Say = Callable[[str], None]


class RLRun:
    """Runs an experiment in a run directory, from wherever it was left."""

    def __init__(self, experiment: RLExperiment, *, say: Say = print):
        self._experiment, self._cfg, self._say = experiment, experiment.cfg, say
        self._checked: Runtime | None = None
        self._said_stopping = False

    def check(self, runtime: Runtime = "ray") -> None:
        """Refuse, before anything expensive and with nothing written, what would fail later. `run` does so too.

        Raises:
            UserError, ValueError: naming the field to change.
        """
        cfg, experiment = self._cfg, self._experiment
        _check_sizes(cfg, runtime)
        check_length(cfg.policy, cfg.max_prompt + cfg.max_new, "max_prompt + max_new", "policy")
        experiment.check()
        roles = (experiment.controller_cfg, experiment.engine_cfg, cfg.parameter_server)
        for part in (*roles, cfg.objective, cfg.learner):
            part.build()
        experiment.make_verifier().close()
        if cfg.warm_start is not None:
            cfg.warm_start.build()  # its mesh and batch
        if cfg.trainer.processes != 1:
            experiment.trainer_cfg.check_processes()
        elif not os.environ.get("RAY_ADDRESS"):  # there the devices are other machines'
            experiment.trainer_cfg.check_sizes()
        if runtime == "ray":
            from rl.runtime.ray.preflight import check_machine

            check_machine(cfg)
        self._checked = runtime

    def run(self, run_dir: str | Path, *, runtime: Runtime = "ray", force: bool = False) -> dict[str, Any] | None:
        """Go through the phases; returns the report, or None if SIGTERM or Ctrl-C asked for the end.

        Raises:
            UserError: bad tasks, sizes or run directory; before anything expensive. DiskFull: there is no room for
                what is written.
        """
        if self._checked != runtime:
            self.check(runtime)
        text = to_text(self._cfg)
        with RunDirectory.open(run_dir, text, force=force) as run, _full_disk(run), graceful_stop() as stop:
            run.resolved_config_path.write_text(to_text(self._experiment.resolved()))
            events = EventLog(run.events_path)
            self._check_checkpoints(run)
            finished = all(
                phase(run, events, stop)
                for phase in (
                    self._warm_start,
                    lambda *a: self._evaluate(*a, when="before"),
                    lambda *a: self._improve(*a, runtime=runtime),
                    lambda *a: self._evaluate(*a, when="after"),
                )
                if not stop.requested
            )
            if stop.requested or not finished:
                why = stop.reason or "request"
                self._say(f"stopped by {why}; the same command goes on from here: {run.path}")
                return None
            return self._summarise(run)

    def _check_checkpoints(self, run: RunDirectory) -> None:
        """A damaged checkpoint is found now, not after processes have been started."""
        for folder in (run.checkpoints / "rl", warm_start_directory(run) / "checkpoints"):
            if folder.is_dir():
                verify_latest(folder)

    def _warm_start(self, run: RunDirectory, events: EventLog, stop: Stop) -> bool:
        cfg = self._cfg.warm_start
        if cfg is None:
            return True
        if (run.path / "eval_before.json").exists() or _latest_step(run.checkpoints / "rl") is not None:
            return True  # a later phase has begun
        with RunDirectory.open(warm_start_directory(run), to_text(cfg)) as inner:
            with _phase(events, "sft"):
                early = "" if cfg.early_stopping is None else ", or fewer if it learns faster"
                self._say(f"supervised fine-tuning: {cfg.num_steps} steps{early}")
                last = Trainer(cfg).run(inner)
            return last["finished"]

    def _improve(self, run: RunDirectory, events: EventLog, stop: Stop, *, runtime: Runtime) -> bool:
        steps = self._cfg.num_steps
        start = _latest_step(run.checkpoints / "rl") or 0
        if start >= steps:
            return True
        if runtime == "ray":
            from rl.runtime.ray.runtime import run_ray

            run_roles = partial(run_ray, say=self._say, preempted=lambda: stop.reason == "SIGTERM")
        else:
            from rl.runtime.inprocess import run_inprocess as run_roles
        self._say(f"reinforcement learning: {steps} updates of {self._cfg.groups * self._cfg.samples} rollouts")
        with _phase(events, "rl"), Progress(steps, start=start, title="rl") as progress:
            shown = _Shown(progress, run)
            done = run_roles(self._experiment, run, lambda: self._stopping(stop), shown.update)
        return done >= steps

    def _stopping(self, stop: Stop) -> bool:
        if stop.requested and not self._said_stopping:
            self._said_stopping = True
            self._say("stopping after the update in hand (Ctrl-C again: at once)")
        return stop.requested

    def _evaluate(self, run: RunDirectory, events: EventLog, stop: Stop, *, when: str) -> bool:
        path = run.path / f"eval_{when}.json"
        if self._cfg.evaluation is None or path.exists():
            return True
        with _phase(events, f"eval_{when}"):
            version = self._cfg.num_steps if when == "after" else 0
            problems = self._cfg.tasks.build().heldout(self._cfg.evaluation.problems_per_family)
            self._say(f"evaluation {when} RL: {len(problems)} held-out problems x {self._cfg.samples}")
            engine = self._experiment.make_engine()
            engine.set_weights(self._params(run, make_mesh(), version), version)
            with self._experiment.make_verifier() as verifier:
                outcome = self._cfg.evaluation.build().run(
                    engine,
                    problems,
                    self._experiment.tokenizer,
                    verifier,
                    self._cfg.seed,
                    self._cfg.samples,
                    lambda: stop.requested,
                )
        if outcome is None:
            return False
        summary, rows = outcome
        phase = {"phase": f"eval_{when}", "step": version}
        lines = [json.dumps({**phase, **row}) for row in rows]
        (run.rollouts / f"eval_{when}.jsonl").write_text("\n".join(lines) + "\n")
        _write_json(path, summary)
        return True

    def _params(self, run: RunDirectory, mesh: jax.sharding.Mesh, version: int) -> Params:
        initial = self._experiment.initial_params(run, mesh)
        if version == 0:
            return initial
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), initial)
        return restore_params(run.checkpoints / "rl", abstract)

    def _summarise(self, run: RunDirectory) -> dict[str, Any]:
        report = summarise_run(run, name=run.path.name, seed=self._cfg.seed)
        _write_json(run.path / "report.json", report)
        return report


def _check_sizes(cfg: RLExperiment.Config, runtime: Runtime) -> None:
    least = dict.fromkeys(("num_steps", "groups", "samples", "max_prompt", "max_new"), 1)
    least |= {"staleness": 0, "workers": 1 if runtime == "ray" else 0}
    for name, bound in least.items():
        if getattr(cfg, name) < bound:
            raise UserError(f"{name}={getattr(cfg, name)}; expected {bound} or more")
    if runtime == "inprocess" and cfg.trainer.processes > 1:
        raise UserError(
            f"trainer.processes={cfg.trainer.processes}, but with --runtime inprocess there is one process; expected "
            "--runtime ray, or --set trainer.processes=1"
        )
    if cfg.kill_worker_after is not None and not 0 <= cfg.kill_worker_after <= 1:
        raise UserError(f"kill_worker_after={cfg.kill_worker_after}; expected None or a share of the updates in [0, 1]")


@contextmanager
def _phase(events: EventLog, phase: str) -> Iterator[None]:
    """Mark begin and end of a phase in the event log; the seconds add up over resumed sessions."""
    events.append("driver", "phase_begin", phase=phase)
    began = time.monotonic()
    try:
        yield
    finally:
        seconds = round(time.monotonic() - began, 3)
        events.append("driver", "phase", phase=phase, seconds=seconds)


@contextmanager
def _full_disk(run: RunDirectory) -> Iterator[None]:
    """Says from where the run goes on when there is room again."""
    try:
        with raising_disk_full(run.path):
            yield
    except DiskFull as error:
        step = _latest_step(run.checkpoints / "rl")
        raise DiskFull(error.path, error.point if step is None else f"update {step}") from error


def _latest_step(checkpoints: Path) -> int | None:
    if not checkpoints.is_dir():
        return None
    checkpointer = Checkpointer.Config().build(directory=checkpoints)
    try:
        return checkpointer.latest_step()
    finally:
        checkpointer.close()


class _Shown:
    """Step and recent reward on the terminal, each time the step has advanced."""

    def __init__(self, progress: Progress, run: RunDirectory):
        self._progress, self._rows = progress, JsonlTail(run.metrics_path)
        self._recent: deque[float] = deque(maxlen=10)
        self._step = 0

    def update(self, step: int) -> None:
        self._recent += [row["reward"] for row in self._rows.new_rows() if row["phase"] == "rl"]
        if step != self._step and self._recent:
            self._step = step
            self._progress.update(step, note=f"reward {sum(self._recent) / len(self._recent):.3f}")


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)
