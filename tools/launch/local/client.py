"""The cluster of a run on this machine, as submission and status see it: files in the run directory."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mesh.errors import UserError
from mesh.files.written import replace_file
from tools.launch.control.api import ClusterApi, Object
from tools.launch.kubernetes.names import check_label
from tools.launch.local.cluster import LOCK, LOG, SECRETS, STATUS, WANTED, locked, mark_of, temporary_of
from tools.launch.local.manifest import read_jobset
from tools.launch.local.pod import kill_marked
from tools.launch.plan import LaunchPlan, Role
from tools.launch.process.ray_cluster import GPU_MODEL

_STARTS = 20.0  # seconds
_ENDS = 5.0
_POLL = 0.05
_MOST = 16  # processes that a laptop can have
_RAY_NAMES = {"tpu7x": "v7x"}
_PORTS = range(20_000, 30_000)  # ports below the ephemeral ones


class LocalCluster(ClusterApi):
    """Cluster of one run; `folder` is `launch/cluster` in its run directory."""

    def __init__(self, run_dir: Path, plan: LaunchPlan | None = None):
        """`plan`: of the run, by which the machines of a JobSet that is created have their variables."""
        self.run_dir, self.folder, self.plan = run_dir, run_dir / "launch" / "cluster", plan

    def check(self) -> None:
        """Refuse a machine without addresses of its own for each process, and one whose processes cannot be seen."""
        if not Path("/proc/self/environ").exists():
            raise UserError("--on local needs Linux: it tells the processes of a run by /proc")
        with socket.socket() as probe:
            try:
                probe.bind(("127.64.0.1", 0))
            except OSError as error:
                raise UserError(f"--on local: no loopback address 127.64.0.1 on this machine: {error}") from error

    def place(self, run: str, files: Mapping[str, str], archive: tuple[str, bytes] | None) -> None:
        """Write the submission into the run directory, and the code beside it."""
        if not self.alive:  # remains of another submission, or of the folder, are not started
            self._remove_files()
            for path in (*(self.folder / WANTED).glob("*.json"), self.folder / SECRETS, self.folder / STATUS):
                path.unlink(missing_ok=True)
        try:
            for name, text in files.items():
                path = self.run_dir / "launch" / "submission" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            if archive is not None:
                path = self.run_dir.parent / "bundles" / archive[0]
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    replace_file(path, archive[1])
            (self.run_dir / "launch" / "ended.json").unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{self.run_dir}: cannot write there: {error.strerror}") from error

    def make_secret(self, name: str, values: Mapping[str, str]) -> None:
        """Add a Secret to the file that only this user can read."""
        path, known = self.folder / SECRETS, self._secrets()
        if name in known:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts and answers will be in it
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({**known, name: dict(values)}))

    def create(self, jobset: Object) -> None:
        """Create a JobSet, and start the cluster if it does not run."""
        spec = read_jobset(jobset)
        missing = [
            f"{one['name']} (Secret {source['name']})"
            for one in spec.container.env
            if (source := one.get("valueFrom", {}).get("secretKeyRef")) is not None
            and source["key"] not in self._secrets().get(source["name"], {})
        ]
        if missing:
            raise UserError(f"secrets that are not there: {', '.join(missing)}; set these variables, and submit again")
        wanted = self.folder / WANTED / f"{spec.name}.json"
        if wanted.exists():
            raise UserError(f"JobSet {spec.name} exists; `axl launch stop` removes it")
        wanted.parent.mkdir(parents=True, exist_ok=True)
        machines = {} if self.plan is None else variables_of(self.plan)
        replace_file(wanted, json.dumps({"manifest": jobset, "machines": machines}))
        self._until(lambda: spec.name in self._names(), f"JobSet {spec.name} has not been created")

    def delete(self, *names: str) -> None:
        """Delete JobSets, and return when their processes have ended."""
        for name in names:
            (self.folder / WANTED / f"{name}.json").unlink(missing_ok=True)
        for name in names:
            self._until(partial(self._is_gone, name), f"JobSet {name} has not ended", 90.0, start=False)

    def _is_gone(self, name: str) -> bool:
        return not self.alive or name not in self._names()

    def clean(self, run: str) -> Sequence[str]:
        """End what a cluster that was killed has left, and remove Secrets and containers' files."""
        deadline = time.monotonic() + _ENDS
        while self.alive and not self._names() and time.monotonic() < deadline:
            time.sleep(_POLL)  # process is about to end
        if self.alive:
            return []
        found = [path for path in (self.folder / SECRETS, self.folder / STATUS) if path.exists()]
        for path in found:
            path.unlink()
        self._remove_files()
        return [path.name for path in found]

    def _remove_files(self) -> None:
        """End what a cluster that was killed has left, and remove the files of its containers."""
        kill_marked(f"{mark_of(self.folder)}/")
        shutil.rmtree(temporary_of(self.folder), ignore_errors=True)
        shutil.rmtree(self.folder / "roots", ignore_errors=True)

    def jobsets(self, run: str) -> list[Object]:
        """Return the JobSets; those that nobody carries out any more are reported as lost."""
        found = self._status().get("jobsets", [])
        if self.alive:
            return found
        # A cluster that has ended may have said more than is wanted now.
        found = [one for one in found if (self.folder / WANTED / f"{one['metadata']['name']}.json").exists()]
        for one in found:
            if not one["status"].get("terminalState"):
                one["status"]["lost"] = True
        return found

    def pods(self, run: str) -> list[Object]:
        """Return the Pods."""
        return self._status().get("pods", [])

    def launch_text(self, run: str) -> str:
        """Return the config of the submission."""
        path = self.run_dir / "launch" / "submission" / "launch.txt"
        if not path.is_file():
            raise UserError(f"no submission is kept in {path.parent}, so there is nothing to make workers like")
        return path.read_text()

    def log(self, pod: str, lines: int) -> str:
        """Return the last lines of a Pod's output."""
        path = self.folder / "logs" / f"{pod}.log"
        text = path.read_text(errors="replace") if path.is_file() and not path.is_symlink() else ""
        return "\n".join(text.splitlines()[-lines:])

    @property
    def alive(self) -> bool:
        """True while a process carries out the JobSets."""
        if not (self.folder / LOCK).exists():
            return False
        lock = locked(self.folder)
        if lock is not None:
            lock.close()
        return lock is None

    def _until(self, done: Any, failure: str, seconds: float = _STARTS, *, start: bool = True) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if start:
                self._start()
            if time.monotonic() > deadline:
                log = self.folder / LOG
                said = log.read_text().splitlines()[-1:] if log.exists() else []
                raise UserError(f"{failure} after {seconds:.0f} s; {log}: {''.join(said)}")
            time.sleep(_POLL)

    def _start(self) -> None:
        """Start the process that carries out the JobSets, if none lives; it outlives this one."""
        if self.alive:
            return
        with (self.folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tools.launch.local.cluster", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([_ROOT, os.environ.get("PYTHONPATH", "")])},
            )
        deadline = time.monotonic() + _STARTS
        while not self.alive and process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _names(self) -> list[str]:
        return [one["metadata"]["name"] for one in self._status().get("jobsets", [])] if self.alive else []

    def _status(self) -> dict[str, Any]:
        """Return what the cluster has said; what would be no name in Kubernetes becomes no path here."""
        found = _read(self.folder / STATUS)
        for kind in ("jobsets", "pods"):
            for one in found.get(kind, []):
                check_label(one["metadata"]["name"], f"{self.folder / STATUS}: {kind}")
        return found

    def _secrets(self) -> dict[str, dict[str, str]]:
        return _read(self.folder / SECRETS)


_ROOT = str(Path(__file__).parents[3])


def free_port(run_dir: Path) -> int:
    """Return a port for the head of a run that nothing listens on."""
    first = zlib.crc32(str(run_dir).encode()) % len(_PORTS)
    for offset in range(len(_PORTS)):
        port = _PORTS[(first + offset) % len(_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UserError("no port is free on this machine")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: expected JSON that a cluster on this machine wrote: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object that a cluster on this machine wrote")
    return found


def machine_variables(role: Role) -> dict[str, str]:
    """Return the variables of a role's machines; GKE and Cloud TPU set the same names."""
    if role.slices is None:
        return {"JAX_PLATFORMS": "cpu"}
    cpus = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(role.slices.devices.each_host)}
    if role.slices.gpus:
        return {**cpus, GPU_MODEL: role.slices.devices.model or ""}
    topology = role.slices.topology
    kind = role.slices.accelerator.api or _RAY_NAMES.get(topology.generation.name, topology.generation.name)
    return {
        **cpus,
        "TPU_ACCELERATOR_TYPE": f"{kind}-{role.slices.chips * topology.generation.counted}",
        "TPU_TOPOLOGY": role.slices.shape,
    }


def check_size(plan: LaunchPlan) -> None:
    """Refuse a run with more processes than this machine should start (UserError)."""
    count = sum(role.count * role.jobs * role.pods for role in plan.roles)
    if count > _MOST:
        raise UserError(
            f"--on local: {plan.name} would start {count} processes on this machine, and at most {_MOST} are "
            "sensible; use smaller slices or fewer workers here, and --dry-run DIR to see the manifests of this run"
        )


def variables_of(plan: LaunchPlan) -> dict[str, dict[str, str]]:
    """Return the variables of the machines of each role."""
    return {role.name: machine_variables(role) for role in plan.roles}
