"""One RL run: supervised warm start, evaluation, RL, evaluation, summary. Each is resumed, not repeated.

Roles do the work, on their devices. This process, the driver, starts them and watches the files of the run directory,
which say what is done: the checkpoints of the warm start and of RL, and `eval_before.json` and `eval_after.json`, each
with the step that it belongs to. With the runtime "ray" it opens no device.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.reader import verify_latest
from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.disk import DiskFull, raising_disk_full
from axlearn_like.run.events import EventLog
from axlearn_like.run.signals import Stop, graceful_stop
from mesh import UserError
from mesh.devices import find_devices
from mesh.files.bucket import bucket_url
from mesh.files.written import replace_file
from rl.audit.summary import summarise_run
from rl.controller.evaluations import is_evaluated
from rl.experiment import RLExperiment, Runtime
from rl.fleet.devices import HERE
from rl.fleet.fleet import TRAINER, Placed
from rl.fleet.plan import plan_fleet, refuse
from rl.fleet.requests import role_requests
from rl.runtime.inprocess import DeviceSplit, run_inprocess
from rl.runtime.phases import Phases
from rl.runtime.policies.changes import TakenChanges, failures, stopped_policies, with_joined
from rl.runtime.policies.configs import check_policies, policy_configs
from rl.runtime.policies.runs import OpenRuns, PolicyRun, open_policy_runs
from rl.runtime.policy_phases import PolicyPhases
from rl.runtime.simulated.failures import Failure, Faults
from rl.tasks.rows.unchanged import check_unchanged
from rl.training.trainer import ends_early
from rl.training.warm_start import latest_step

Say = Callable[[str], None]


class RLRun:
    """An experiment that runs, or resumes, in a run directory."""

    def __init__(self, experiment: RLExperiment, *, say: Say = print):
        self._experiment, self._cfg, self._say = experiment, experiment.cfg, say
        self._opened: OpenRuns | None = None  # policies, while the run directory is open
        self._checked: Runtime | None = None
        self._stop: Callable[[], bool] = lambda: False
        self._said_stopping = False

    def check(self, runtime: Runtime = "ray", run_dir: str | Path | None = None) -> None:
        """Check what would fail later, before anything expensive and with nothing written. `run` does so too.

        Of a config by which `run_dir` holds updates, the trainer alone is checked: a killed command is back sooner.

        Raises:
            UserError: names the field to change.
        """
        if runtime == "ray" and run_dir is not None and bucket_url(run_dir) and os.environ.get("RAY_ADDRESS"):
            raise UserError(
                f"{run_dir}: roles on other machines of the cluster at RAY_ADDRESS write events and records into the "
                "run directory, too, and only the driver's machine copies its files to a bucket; expected one on a "
                "common disk, such as the bucket mounted by gcsfuse (axl launch --storage gs://BUCKET/FOLDER mounts it)"
            )
        if run_dir is not None:
            self._take_joined(run_dir)
        devices = self._devices() if runtime == "ray" else DeviceSplit.of(self._cfg).trainer
        if run_dir is not None and self._has_begun(run_dir):
            self._experiment.trainer_cfg.check(devices)
        else:
            self._cfg.check(runtime, devices=devices)
            check_policies(self._cfg, runtime, devices)
        if runtime == "ray":
            together = self._cfg.fleet.workers == TRAINER
            self._cfg.fleet.require("workers", not together, f"devices; {TRAINER!r} needs --runtime inprocess")
            if not self._cfg.fleet.here:
                refuse(plan_fleet(Placed(self._cfg, self._cfg.fleet.build()), compile_programs=False))
            role_requests(self._cfg, () if os.environ.get("RAY_ADDRESS") else find_devices())
            from rl.runtime.ray.preflight import check_machine

            check_machine(self._cfg)
        self._checked = runtime

    def _take_joined(self, run_dir: str | Path) -> None:
        """Take the policies that have joined the run in a directory among those of the experiment."""
        cfg = with_joined(self._cfg, RunDirectory.attach(run_dir))
        if cfg is not self._cfg:
            self._experiment, self._cfg = cfg.build(), cfg

    def _has_begun(self, run_dir: str | Path) -> bool:
        """Return True if a run directory has a checkpoint by this config."""
        if bucket_url(run_dir) or self._cfg.policies:
            return False
        run = RunDirectory.attach(run_dir)
        same = run.config_path.exists() and run.read_config() == to_text(self._cfg)
        return same and latest_step(run.checkpoints / "rl") is not None

    def _devices(self) -> Sequence[Any]:
        """Describe the trainer's devices; empty if they are not known here."""
        fleet, several = self._cfg.fleet, self._cfg.trainer.processes > 1
        if fleet.trainer != HERE:
            return fleet.build().trainer.described
        return () if several or os.environ.get("RAY_ADDRESS") else find_devices()

    def run(
        self,
        run_dir: str | Path,
        *,
        runtime: Runtime = "ray",
        force: bool = False,
        progress: bool = True,
        kill_worker_after: float | None = None,
        trace: Sequence[Failure] = (),
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any] | None:
        """Run all phases; returns the report, or None if SIGTERM, Ctrl-C or `stop()` stopped the run.

        Args:
            run_dir: the run directory, or its URL; a new one, or the one to resume.
            runtime: "ray" runs each role in a process of its own, "inprocess" all in this one.
            force: resume even if the run directory holds another config.
            progress: show updates and answers on the terminal.
            kill_worker_after: inject a fault: kill one worker after this share of the updates, in (0, 1], once in a
                run. The runtime must be "ray".
            trace: inject these faults, too, by their times from the first update on.
            stop: True ends the run after the current update; asked at least once for each.

        Raises:
            UserError: bad tasks, sizes or run directory; before anything expensive. DiskFull: no space is left.
        """
        if trace and runtime != "ray":
            raise UserError("trace: expected runtime ray, where roles are processes that can be killed")
        kill_at = None if kill_worker_after is None else self._update_of_kill(kill_worker_after, runtime)
        faults = Faults(kill_at, list(trace))
        faults.check(self._cfg.workers)
        self._take_joined(run_dir)
        if self._checked != runtime:
            self.check(runtime, run_dir)
        text = to_text(self._cfg)
        if not RunDirectory.attach(run_dir).config_path.exists():  # run will have parameters
            self._experiment.check_start()
        self._stop = stop
        with (
            RunDirectory.open(run_dir, text, force=force) as run,
            open_policy_runs(self._experiment, run) as self._opened,
            _full_disk(run),
            graceful_stop() as signals,
        ):
            for part in self._parts:
                self._record(part, force)
            self._say(f"run directory: {run.where}")
            self._stop = lambda: stop() or run.is_cut_off()
            if self._are_done(but=self._stopped(run)) and not run.forced:  # roles refuse another model's checkpoint
                self._verify_done()
            else:
                self._run_roles(run, signals, runtime, faults, progress)
            failed = failures(run) if self._cfg.policies else {}
            if not self._are_done(but=failed.keys() | self._stopped(run)):
                why = signals.reason or "request"
                self._say(f"stopped by {why}; the same command resumes the run: {run.path}")
                return None
            return self._summarise(run, failed)

    @property
    def _parts(self) -> list[PolicyRun]:
        return [] if self._opened is None else self._opened.parts

    def _record(self, part: PolicyRun, force: bool) -> None:
        """Write what a policy's config resolves to, and refuse other data than it had (UserError)."""
        replace_file(part.run.resolved_config_path, to_text(part.experiment.resolved()))
        check_unchanged(part.run.path, part.experiment.data_digests(), force=force)

    def _joined(self) -> list[PolicyRun]:
        """Open the directories of policies that have joined since the last look; one that cannot be is named."""
        assert self._opened is not None
        found = []
        try:
            new = self._opened.new()
        except UserError as error:
            self._say(f"no policy joins: {error}")
            return []
        for part in new:
            try:
                opened = self._opened.open(part)
                self._record(opened, False)
            except UserError as error:
                self._say(f"policy {part.name} cannot join: {error}")
            else:
                self._opened.parts.append(opened)
                self._say(f"policy {part.name} joins")
                found.append(opened)
        return found

    def _stopped(self, run: RunDirectory) -> frozenset[str]:
        """Return the policies that are to stop, or have stopped where the file that says so was spoilt since."""
        if not self._cfg.policies:
            return frozenset()
        try:
            return stopped_policies(run)
        except UserError:
            return frozenset(part.name for part in self._parts if TakenChanges(run).is_stopped(part.name))

    def _are_done(self, but: Collection[str] = ()) -> bool:
        return all(self._is_done(part) for part in self._parts if part.name not in but)

    def _verify_done(self) -> None:
        """Verify the checkpoints of a run that has finished: roles verify what they restore, here nothing is."""
        for part in self._parts:
            verify_latest(part.run.checkpoints / "rl")
        steps = " and ".join(dict.fromkeys(str(latest_step(part.run.checkpoints / "rl")) for part in self._parts))
        self._say(f"finished before, at update {steps}: nothing is done again")

    def _is_done(self, part: PolicyRun) -> bool:
        cfg, run = part.experiment.cfg, part.run
        step = latest_step(run.checkpoints / "rl")
        if step is None or not (step >= cfg.num_steps or ends_early(cfg.trainer, run, step)):
            return False
        return cfg.evaluation is None or is_evaluated(run, "after", step)

    def _update_of_kill(self, share: float, runtime: Runtime) -> int:
        if not 0 < share <= 1:
            raise UserError(f"kill_worker_after={share:g}; expected a share of the updates, more than 0 and at most 1")
        if runtime != "ray" or not self._cfg.workers:
            raise UserError("kill_worker_after needs a worker in a process of its own; expected runtime ray, workers=1")
        steps = [cfg.num_steps for cfg in policy_configs(self._cfg).values()] or [self._cfg.num_steps]
        return max(1, round(share * sum(steps)))

    def _run_roles(self, run: RunDirectory, stop: Stop, runtime: Runtime, faults: Faults, progress: bool) -> None:
        """Start the roles, which do all that is not done, and show their progress."""
        if runtime == "ray":
            from rl.runtime.ray.runtime import run_ray

            preempted = lambda: stop.reason == "SIGTERM"  # noqa: E731
            run_roles = partial(run_ray, say=self._say, preempted=preempted, faults=faults)
        else:
            run_roles = run_inprocess
        for part in self._parts:
            (part.run.path / "report.json").unlink(missing_ok=True)  # report of fewer updates
        start, starting = latest_step(run.checkpoints / "rl") or 0, "; starting Ray and the roles"
        shown: dict[str, Any] = {"starting": starting if runtime == "ray" else "", "progress": progress}
        if self._cfg.policies:
            all_phases: Any = PolicyPhases(self._parts, self._say, **shown, joined=self._joined)
        else:
            all_phases = Phases(self._cfg, run, EventLog(run.events_path), self._say, start=start, **shown)
        with all_phases as phases:
            phases.update(start)
            run_roles(self._experiment, run, lambda: self._stopping(stop), phases.update)

    def _stopping(self, stop: Stop) -> bool:
        if stop.requested and not self._said_stopping:
            self._said_stopping = True
            self._say("stopping after the current update (Ctrl-C again: at once)")
        return self._stop() or stop.requested

    def _summarise(self, run: RunDirectory, failed: Mapping[str, str]) -> dict[str, Any]:
        """Write report.json of each policy that is done; returns the report, or those of several policies by name."""
        reports = {}
        stopped = self._stopped(run)
        for part in (part for part in self._parts if part.name not in failed and part.name not in stopped):
            reports[part.name] = summarise_run(part.run, name=part.run.path.name, seed=part.experiment.cfg.seed)
            replace_file(part.run.path / "report.json", json.dumps(reports[part.name], indent=2) + "\n")
        if not self._cfg.policies:
            return reports[""]
        told = {"failed": dict(failed), "stopped": sorted(stopped)}
        report = {"name": run.path.name, "seed": self._cfg.seed, "policies": reports, **told}
        replace_file(run.path / "report.json", json.dumps(report, indent=2) + "\n")
        return report


@contextmanager
def _full_disk(run: RunDirectory) -> Iterator[None]:
    """Add to a DiskFull error the update from which the run will resume."""
    try:
        with raising_disk_full(run.path):
            yield
    except DiskFull as error:
        step = latest_step(run.checkpoints / "rl")
        raise DiskFull(error.path, error.point if step is None else f"update {step}") from error
