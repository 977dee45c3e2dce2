"""The process that carries out the JobSets of a run on this machine, until all have ended.

    python -m tools.launch.local.cluster FOLDER

FOLDER is `launch/cluster` of a run directory. In `wanted/` is a file for each JobSet that is to be there; one that goes
is ended. `status.json` says what is. A cluster that was killed leaves processes; the next ends them and starts again.
"""

import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import stat
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from mesh.errors import UserError
from mesh.files.written import replace_file
from tools.launch.control.api import ROLE
from tools.launch.local.jobset import JobSet, random_suffix
from tools.launch.local.manifest import JobSetSpec, read_jobset
from tools.launch.local.pod import Place, Pod, kill_marked

WANTED, STATUS, SECRETS, LOCK, LOG = "wanted", "status.json", "secrets.json", "lock", "cluster.log"
CODE = "/opt/axl"  # folder in a container, not on a volume
_POLL = 0.1  # seconds


class Cluster:
    """All JobSets of one run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.mark = mark_of(folder)
        # Not below the folder: sockets need short paths.
        self.temporary = temporary_of(folder)
        self.jobsets: dict[str, JobSet] = {}
        self._machines: dict[str, Mapping[str, Any]] = {}
        self._addresses: dict[str, str] = {}  # address by the shortest name
        self._names: dict[str, str] = {}  # every name
        self._stopping = False
        self._written = ""

    def run(self) -> None:
        """Carry out what is wanted until all of it has ended, or SIGTERM has come."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        kill_marked(f"{self.mark}/")
        shutil.rmtree(self.temporary, ignore_errors=True)  # remains of a cluster that was killed
        (self.folder / STATUS).unlink(missing_ok=True)
        while True:
            self._follow_wanted()
            for jobset in list(self.jobsets.values()):
                jobset.step()
                if jobset.deleted and not jobset.running:
                    del self.jobsets[jobset.spec.name]
                    self.say(f"{jobset.spec.name}: deleted")
            self._write_status()
            if not any(jobset.running or not jobset.terminal for jobset in self.jobsets.values()):
                shutil.rmtree(self.temporary, ignore_errors=True)
                return
            time.sleep(_POLL)

    def say(self, line: str) -> None:
        """Add a line to the cluster's own log, which is its standard output."""
        print(time.strftime("%H:%M:%S"), line, flush=True)

    def _on_signal(self, *_: Any) -> None:
        self._stopping = True

    def _follow_wanted(self) -> None:
        names = {path.stem: path for path in sorted((self.folder / WANTED).glob("*.json"))}
        if self._stopping:
            names = {}
        for name, jobset in self.jobsets.items():
            if name not in names and not jobset.deleted:
                jobset.terminate()
        for name, path in names.items():
            if name in self.jobsets:
                continue
            try:
                wanted = json.loads(path.read_text())
            except FileNotFoundError:
                continue
            spec = read_jobset(wanted["manifest"])
            self._machines[name] = wanted.get("machines", {})
            self._register(spec)
            self.jobsets[name] = JobSet(spec, self._make_pod, self.say)
            self.say(f"{name}: created")

    def _register(self, spec: JobSetSpec) -> None:
        """Give every Pod an address under the name by which others find it."""
        for job, index in itertools.product(range(spec.replicas), range(spec.pods)):
            host = f"{spec.name}-{spec.job}-{job}-{index}.{spec.name}"
            address = self._addresses.setdefault(host, self._address(len(self._addresses)))
            for domain in (f".{spec.namespace}.svc.cluster.local", f".{spec.namespace}.svc", ""):
                self._names[host + domain] = address

    def _address(self, number: int) -> str:
        """Return a loopback address, of a block that is the run's own."""
        block = zlib.crc32(self.mark.encode()) % (190 * 256)
        return f"127.{64 + block // 256}.{block % 256}.{number + 1}"

    def _resolve(self, text: str) -> str:
        names = sorted((re.escape(name) for name in self._names if name in text), key=len, reverse=True)
        rule = rf"(?<![\w.-])(?:{'|'.join(names)})(?![\w.-])"
        return re.sub(rule, lambda found: self._names[found[0]], text) if names else text

    def _make_pod(self, spec: JobSetSpec, name: str, labels: Mapping[str, str]) -> Pod:
        full = f"{name}-{random_suffix()}"
        index = labels["batch.kubernetes.io/job-completion-index"]
        machine = self._machines[spec.name].get(labels.get(ROLE, ""), {})
        address = self._addresses[f"{name}.{spec.name}"]
        _make_private(self.temporary)
        # One for each machine: Ray numbers its sockets by what it finds in the folder.
        temporary = self.temporary / address.rpartition(".")[2]
        variables = {**machine, "JOB_COMPLETION_INDEX": index, "RAY_TMPDIR": str(temporary)}
        if spec.container.chips:
            first = name.rpartition("-")[0]
            hosts = [self._addresses[f"{first}-{other}.{spec.name}"] for other in range(spec.pods)]
            variables |= {"TPU_WORKER_ID": index, "TPU_WORKER_HOSTNAMES": ",".join(hosts)}
            if spec.replicas > 1:
                coordinator = self._addresses[f"{spec.name}-{spec.job}-0-0.{spec.name}"]
                part = labels["jobset.sigs.k8s.io/job-index"]
                variables |= slice_variables(spec.replicas, part, coordinator)
        place = Place(
            name=full,
            namespace=spec.namespace,
            address=address,
            labels=labels,
            root=self.folder / "roots" / name,
            private=(CODE,),
            log=self.folder / "logs" / f"{full}.log",
            mark=f"{self.mark}/{full}",
            variables=variables,
        )
        return Pod(spec.container, place, spec.grace, self._resolve, self._secret)

    def _secret(self, name: str, key: str) -> str:
        return json.loads((self.folder / SECRETS).read_text())[name][key]

    def _write_status(self) -> None:
        pods = [pod for jobset in self.jobsets.values() for pod in jobset.pods]
        former = [one.last_failure for one in self.jobsets.values() if one.last_failure is not None]
        every = {pod.place.name: pod.as_object() for pod in (*former, *pods)}
        found = {
            "pid": os.getpid(),
            "jobsets": [jobset.as_object() for jobset in self.jobsets.values()],
            "pods": list(every.values()),
        }
        text = json.dumps(found, indent=1)
        if text != self._written:
            replace_file(self.folder / STATUS, text)
            self._written = text


def slice_variables(slices: int, part: str, coordinator: str) -> dict[str, str]:
    """Return the variables by which GKE joins the slices of a JobSet."""
    names = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
    return dict(zip(names, (str(slices), part, f"{coordinator}:8080"), strict=True))


def mark_of(folder: Path) -> str:
    """Return the mark of all processes of a run's cluster."""
    return f"{os.getuid()}-{zlib.crc32(str(folder.resolve()).encode()):08x}"


def temporary_of(folder: Path) -> Path:
    """Return the folder of a cluster's sockets; removed when it has ended, by `stop`, or by the next cluster there."""
    return Path("/tmp") / f"axl-{mark_of(folder)}"


def _make_private(folder: Path) -> None:
    """Make a folder, whose name others can guess, for this user alone (UserError: another user has made it)."""
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise UserError(f"{folder} belongs to another user; the sockets of this run would be there")
    folder.chmod(0o700)


def locked(folder: Path) -> IO[str] | None:
    """Take the lock of a run's cluster; None: a cluster has it, and lives. Nothing is written, and no link followed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        file = os.fdopen(os.open(folder / LOCK, flags, 0o600), "r+")
    except OSError as error:
        raise UserError(f"{folder / LOCK} cannot be a lock: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def main(arguments: list[str]) -> int:
    """Run the cluster of a folder, unless there is one."""
    folder = Path(arguments[0]).resolve()
    lock = locked(folder)
    if lock is None:
        return 0
    with lock:
        Cluster(folder).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
