"""The phases of one RL run: supervised warm start, evaluation, RL, evaluation, summary. Each is resumed, not repeated.

The files of the run directory say which phases are done: the checkpoints of the warm start and of RL, and
`eval_before.json` and `eval_after.json`, each with the step that it belongs to.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

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
from axlearn_like.training.trainer import Trainer
from mesh import UserError, make_mesh
from rl.audit.summary import summarise_run
from rl.experiment import RLExperiment, Runtime, warm_start_directory

Say = Callable[[str], None]


class RLRun:
    """An experiment that runs, or resumes, in a run directory."""

    def __init__(self, experiment: RLExperiment, *, say: Say = print):
        self._experiment, self._cfg, self._say = experiment, experiment.cfg, say
        self._checked: Runtime | None = None
        self._said_stopping = False

    def check(self, runtime: Runtime = "ray") -> None:
        """Check what would fail later, before anything expensive and with nothing written. `run` does so too.

        Raises:
            UserError: names the field to change.
        """
        self._cfg.check(runtime)
        if runtime == "ray":
            from rl.runtime.ray.preflight import check_machine

            check_machine(self._cfg)
        self._checked = runtime

    def run(
        self,
        run_dir: str | Path,
        *,
        runtime: Runtime = "ray",
        force: bool = False,
        kill_worker_after: float | None = None,
    ) -> dict[str, Any] | None:
        """Run all phases; returns the report, or None if SIGTERM or Ctrl-C stopped the run.

        Args:
            run_dir: the run directory; a new one, or the one to resume.
            runtime: "ray" runs each role in a process of its own, "inprocess" all in this one.
            force: resume even if the run directory holds another config.
            kill_worker_after: inject a fault: kill one worker after this share of the updates, in (0, 1], once in a
                run. The runtime must be "ray".

        Raises:
            UserError: bad tasks, sizes or run directory; before anything expensive. DiskFull: no space is left.
        """
        kill_at = None if kill_worker_after is None else self._update_of_kill(kill_worker_after, runtime)
        if self._checked != runtime:
            self.check(runtime)
        text = to_text(self._cfg)
        with RunDirectory.open(run_dir, text, force=force) as run, _full_disk(run), graceful_stop() as stop:
            run.resolved_config_path.write_text(to_text(self._experiment.resolved()))
            events = EventLog(run.events_path)
            self._check_checkpoints(run)
            self._say(f"run directory: {run.path}")
            finished = all(
                phase(run, events, stop)
                for phase in (
                    self._warm_start,
                    lambda *a: self._evaluate(*a, when="before"),
                    lambda *a: self._improve(*a, runtime=runtime, kill_at=kill_at),
                    lambda *a: self._evaluate(*a, when="after"),
                )
                if not stop.requested
            )
            if stop.requested or not finished:
                why = stop.reason or "request"
                self._say(f"stopped by {why}; the same command resumes the run: {run.path}")
                return None
            return self._summarise(run)

    def _check_checkpoints(self, run: RunDirectory) -> None:
        """Check the newest checkpoints, so that a damaged one is found before processes are started."""
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

    def _update_of_kill(self, share: float, runtime: Runtime) -> int:
        if not 0 < share <= 1:
            raise UserError(f"kill_worker_after={share:g}; expected a share of the updates, more than 0 and at most 1")
        if runtime != "ray" or not self._cfg.workers:
            raise UserError("kill_worker_after needs a worker in a process of its own; expected runtime ray, workers=1")
        return max(1, round(share * self._cfg.num_steps))

    def _improve(
        self, run: RunDirectory, events: EventLog, stop: Stop, *, runtime: Runtime, kill_at: int | None
    ) -> bool:
        steps = self._cfg.num_steps
        start = _latest_step(run.checkpoints / "rl") or 0
        if start >= steps:
            return True
        if runtime == "ray":
            from rl.runtime.ray.runtime import run_ray

            preempted = lambda: stop.reason == "SIGTERM"  # noqa: E731
            run_roles = partial(run_ray, say=self._say, preempted=preempted, kill_after_update=kill_at)
        else:
            from rl.runtime.inprocess import run_inprocess as run_roles
        (run.path / "report.json").unlink(missing_ok=True)  # of fewer updates
        starting = "; starting Ray and the roles" if runtime == "ray" else ""
        self._say(
            f"reinforcement learning: {steps} updates of {self._cfg.groups * self._cfg.samples} rollouts{starting}"
        )
        with _phase(events, "rl"), Progress(steps, start=start, title="rl") as progress:
            shown = _Shown(progress, run)
            done = run_roles(self._experiment, run, lambda: self._stopping(stop), shown.update)
        return done >= steps

    def _stopping(self, stop: Stop) -> bool:
        if stop.requested and not self._said_stopping:
            self._said_stopping = True
            self._say("stopping after the current update (Ctrl-C again: at once)")
        return stop.requested

    def _evaluate(self, run: RunDirectory, events: EventLog, stop: Stop, *, when: str) -> bool:
        if self._cfg.evaluation is None:
            return True
        path = run.path / f"eval_{when}.json"
        version = 0 if when == "before" else _latest_step(run.checkpoints / "rl") or 0
        if path.exists() and json.loads(path.read_text())["step"] == version:
            return True
        with _phase(events, f"eval_{when}"):
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
        _write_json(path, {"step": version, **summary})
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


@contextmanager
def _phase(events: EventLog, phase: str) -> Iterator[None]:
    """Log the begin and end of a phase; its seconds add up over resumed sessions."""
    events.append("driver", "phase_begin", phase=phase)
    began = time.monotonic()
    try:
        yield
    finally:
        seconds = round(time.monotonic() - began, 3)
        events.append("driver", "phase", phase=phase, seconds=seconds)


@contextmanager
def _full_disk(run: RunDirectory) -> Iterator[None]:
    """Add to a DiskFull error the update from which the run will resume."""
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
    """Progress line on the terminal: step and recent reward, each time the step advances."""

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
