"""A run that was launched, by its name or its directory: `launch(cfg)` submits one, `find_run` finds one."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from axlearn_like.config import from_text, trust
from mesh import UserError
from tools.launch.control import submit as submission_of
from tools.launch.control.api import ClusterApi
from tools.launch.control.status import JobSetStatus, status_of, verdict
from tools.launch.kubernetes.client import Client
from tools.launch.kubernetes.cluster import KubernetesCluster
from tools.launch.kubernetes.kubeconfig import find_access
from tools.launch.launch import Launch
from tools.launch.local.client import LocalCluster, check_size, free_port
from tools.launch.plan import LaunchPlan, plan_launch, refuse
from tools.launch.queued.cluster import GoogleAccess, QueuedResources, queued_resources
from tools.launch.queued.request import queued_resource
from tools.launch.slurm.jobs import SlurmJobs
from tools.launch.submission import submission

Say = Callable[[str], None]
_DEFAULT_PORT = 6379
_POLL = 0.5  # seconds
_ENDED = ("completed", "failed", "lost")


@dataclasses.dataclass(frozen=True)
class LaunchedRun:
    """A run on a cluster."""

    name: str
    api: ClusterApi | QueuedResources | SlurmJobs

    def status(self) -> list[JobSetStatus]:
        """Return the status of its JobSets."""
        return status_of(self.api, self.name)

    def wait(self, seconds: float = float("inf"), say: Say | None = None) -> list[JobSetStatus]:
        """Return the status when it has ended, or after so many seconds; `say` gets a line for each change."""
        deadline, said = time.monotonic() + seconds, ""
        while True:
            found = self.status()
            line = verdict(found)
            if say is not None and line != said:
                say(line)
                said = line
            failed = any(one.state in ("failed", "lost") for one in found)
            if failed or all(one.state in _ENDED for one in found) or time.monotonic() > deadline:
                return found
            time.sleep(_POLL)

    def logs(self, role: str | None = None, lines: int = 50) -> dict[str, str]:
        """Return the last lines of its Pods by their names; those of one role, or of a Pod by the start of its name."""
        names = [pod["metadata"]["name"] for pod in self.api.pods(self.name)]
        chosen = [name for name in names if role is None or name.startswith((role, f"{self.name}-{role}"))]
        return {name: self.api.log(name, lines) for name in chosen}

    def add_workers(self, count: int, say: Say = print) -> None:
        """Add workers to it, an RL run; results do not depend on them."""
        if isinstance(self.api, QueuedResources):
            raise UserError(f"{self.name} is a queued resource, which has no workers to add")
        if isinstance(self.api, SlurmJobs):
            raise UserError(f"{self.name} runs on Slurm: end it, and launch it again with more --workers; it goes on")
        trust(Launch.__module__)  # module of the text's first line; a config of another kind is refused below
        cfg = from_text(self.api.launch_text(self.name))
        if not isinstance(cfg, Launch.Config):
            raise UserError(f"{self.name}: what was submitted is no Launch.Config")
        plan = plan_launch(cfg)
        if isinstance(self.api, LocalCluster):
            self.api.plan = plan
        submission_of.add_workers(self.api, cfg, plan, count, say)

    def stop(self, say: Say = print) -> None:
        """End it, and remove what belongs to it but its results (UserError: nothing of it is left to end)."""
        if isinstance(self.api, SlurmJobs) and not self.api.active():
            raise UserError(f"{self.name} has no job that is queued or running; its results stay in {self.api.run_dir}")
        submission_of.stop(self.api, self.name, say)


def launch(cfg: Launch.Config, plan: LaunchPlan | None = None, say: Say = print) -> LaunchedRun:
    """Submit a run, or resume one; returns as soon as it is submitted.

    Raises:
        UserError: it cannot run there, or the cluster refuses it. Nothing of it is left.
    """
    cfg = cfg.clone()
    if plan is None:
        plan = plan_launch(cfg)
    refuse(plan)
    cfg.require("on", cfg.on != "slurm", "another target; tools.launch.slurm.jobs has Slurm's, whose commands show it")
    if cfg.on == "queued-resource":
        resources = queued_resources(cfg, say)
        _, bundle = submission(cfg, plan)
        if bundle is not None:
            say(bundle.summary)
        resources.submit(cfg, plan, None if bundle is None else (bundle.file_name, bundle.content))
        say(f"asked for the queued resource {plan.name}; --wait asks again whenever it is lost")
        return LaunchedRun(plan.name, resources)
    api = _cluster(cfg, plan)  # may choose a port, so before the files
    files, bundle = submission(cfg, plan)
    if bundle is not None:
        say(bundle.summary)
    submission_of.submit(api, cfg, plan, files, bundle, say)
    return LaunchedRun(plan.name, api)


def keep(cfg: Launch.Config, plan: LaunchPlan, say: Say = print) -> None:
    """Keep the queued resource of a run until it has ended: one that is lost is deleted and asked for again."""
    _, bundle = submission(cfg, plan)
    request = queued_resource(cfg, plan, "" if bundle is None else bundle.digest)
    queued_resources(cfg, say).keeper(plan.name).keep(request)


def find_run(name: str, namespace: str = "default", where: str | None = None) -> LaunchedRun:
    """Return a run by its directory on this machine, or by its name in a namespace of a cluster.

    With `where`, PROJECT/ZONE, it is a queued resource.

    Raises:
        UserError: there is none here, and kubectl knows no cluster.
    """
    if where is not None:
        project, slash, zone = where.partition("/")
        if not (project and slash and zone):
            raise UserError(f"--queued-resource {where!r}: expected PROJECT/ZONE")
        place = f"projects/{project}/locations/{zone}"
        return LaunchedRun(name, QueuedResources(Client(GoogleAccess()), place, print))
    path = Path(name).expanduser()
    for folder in (path, Path("runs") / name):
        if (folder / "launch" / "cluster").is_dir():
            return LaunchedRun(folder.resolve().name, LocalCluster(folder.resolve()))
        if any((folder / "launch" / "submission").glob("*.sbatch")):
            return LaunchedRun(folder.resolve().name, SlurmJobs(folder.resolve()))
    if "/" in name:
        raise UserError(f"no run was launched in {path}; expected its directory, or the name of a run on a cluster")
    return LaunchedRun(name, KubernetesCluster(Client(find_access()), namespace))


def _cluster(cfg: Launch.Config, plan: LaunchPlan) -> ClusterApi:
    """Return the cluster of a submission; on this machine, the port of its head is one that is free."""
    if cfg.on == "gke":
        return KubernetesCluster(Client(find_access()), cfg.kubernetes.namespace, cfg, plan)
    check_size(plan)
    run_dir = cfg.place().directory / plan.name
    if cfg.port == _DEFAULT_PORT:
        cfg.port = free_port(run_dir)
    return LocalCluster(run_dir, plan)
