"""A process of a launched run, in its container: its rank, its chips, its log, its end.

    python -m tools.launch.process train --name JOBSET --run-dir DIR [--hosts N --slices S --meet HOST:PORT] -- COMMAND
    python -m tools.launch.process command --name JOBSET --run-dir DIR --folder DIR -- COMMAND
    python -m tools.launch.process head --name JOBSET --run-dir DIR --port PORT --nodes N -- COMMAND
    python -m tools.launch.process node --name JOBSET --run-dir DIR --hosts N --head HOST:PORT
    python -m tools.launch.process added --name JOBSET --run-dir DIR --head HOST:PORT -- COMMAND

`head` starts a Ray cluster and runs the command, which waits for it while both start; `node` adds its machine to that
cluster until the run has ended.
`added` does so for a machine on which nothing is placed, and runs a command there: one more worker.
Rank, world size and meeting point come from the arguments and from the index that Kubernetes gives; what the platform
says of the same (stale after some preemptions) is compared, and a difference is reported. A process that was asked
to stop ends with status 143, also where its command saved and ended with 0: the run is not complete, and restarts.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

STOPPED = 128 + signal.SIGTERM
USER_ERROR = 2
_RESTART = 70  # a machine that is not as expected; another may be
_POLL = 0.2  # seconds
_PIPE = 1.0
_SEEN = 2.0  # until `ray start --block` ends after one of Ray's processes
_FIND_HEAD = 600.0  # seconds
# No monitor of an autoscaler, which there is none of, and none of logs: the driver reads no role's output by Ray.
_QUIET = ("--disable-usage-stats", "--log-color=false", "--include-log-monitor=false")
# Roles are actors with environments of their own: processes that Ray starts ahead would stay idle. They are not to run
# at nice 15, nor to lose their view of accelerators where they ask Ray for none.
_RAY = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_maximum_startup_concurrency": "8",  # by default as many as there are cores: two of three services
    # A machine whose port refuses is lost after 2 s, not 15; one that is slow to answer has 10 s for each of four.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
}
_RAY_END = 10.0  # seconds
_WITHOUT_RAY = 30.0  # for a command whose Ray has died
_HAND_BACK = 12.0  # seconds that roles have, of the 15 that a spot machine gives
_CHIPS = re.compile(r"accel\d+|\d+")  # in /dev and /dev/vfio


class Wrong(Exception):
    """A machine or a platform that is not as the arguments say."""


def rank(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Return the number of this process among those of all slices."""
    index, part = environment.get("JOB_COMPLETION_INDEX", "0"), environment.get("AXL_SLICE", "0")
    if not index.isdecimal() or not part.isdecimal():
        raise Wrong(f"JOB_COMPLETION_INDEX={index!r}, AXL_SLICE={part!r}: expected numbers")
    if int(index) >= arguments.hosts or int(part) >= arguments.slices:
        most = f"{arguments.slices} slices of {arguments.hosts} hosts"
        raise Wrong(f"slice {part}, host {index}: expected one of {most}")
    return int(part) * arguments.hosts + int(index)


def platform_rank(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int | None:
    """Return the same by the platform's own variables; None: it does not say."""
    index, part = environment.get("TPU_WORKER_ID", ""), environment.get("MEGASCALE_SLICE_ID", "0")
    if not index.isdecimal() or not part.isdecimal():
        return None
    return int(part) * arguments.hosts + int(index)


def seen_chips(devices: Path = Path("/dev")) -> int:
    """Return the number of TPU chips that this container has."""
    folders = (devices / "vfio", devices)
    for folder in folders:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        wanted = [name for name in names if _CHIPS.fullmatch(name) and (folder.name == "vfio" or name[0] == "a")]
        if wanted:
            return len(wanted)
    return 0


def check_machine(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Return the rank; report what does not fit.

    Raises:
        Wrong: this is no machine for the process.
    """
    own, theirs = rank(arguments, environment), platform_rank(arguments, environment)
    if theirs is not None and theirs != own:
        print(f"axl: this is process {own} by its index, and {theirs} by the platform's variables; {own} counts")
    if arguments.chips and environment.get("JAX_PLATFORMS") != "cpu":
        found = seen_chips()
        if found != arguments.chips:
            raise Wrong(f"this machine shows {found} TPU chips; expected {arguments.chips}")
    return own


def machine_lines(environment: Mapping[str, str]) -> list[str]:
    """Return what is otherwise on this machine than expected, but no reason to end; where CPUs stand in, nothing."""
    if environment.get("JAX_PLATFORMS") == "cpu":
        return []
    from tools.launch.checks import clock_lines, version_lines

    return [*version_lines(Path("constraints.txt")), *clock_lines(environment)]


def release_lock(run_dir: Path, host: str) -> None:
    """Remove the lock of the run directory if an earlier container of this process left it, on another machine.

    A lock is honoured where its machine cannot be asked whether the owner lives. Here it is known to be gone: the
    platform starts a process again only when all of the old ones are. Locks of others are left alone.
    """
    lock, last = run_dir / "run.lock", run_dir / "launch" / "host"
    last.parent.mkdir(parents=True, exist_ok=True)
    try:
        owner = json.loads(lock.read_text())["host"]
    except (OSError, ValueError, KeyError):
        owner = None
    if owner is not None and owner != host and last.is_file() and owner == last.read_text():
        lock.unlink()
        print(f"axl: the run was on {owner}, and goes on here")
    last.write_text(host)


class Child:
    """A command whose output goes to a log too, and which gets our SIGTERM."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path | None = None):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self._began = log, time.time()
        # A group of its own: a signal for the container's group would reach it twice.
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._copier = threading.Thread(target=_copy, args=(self._process.stdout, log), daemon=True)
        self._copier.start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process.poll() is None:
            self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, killing after `timeout`; record the status beside the log and return it."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # In turns: a signal that comes just before a wait begins is handled when that wait ends.
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL)
        self.kill()
        status = self._process.wait()
        self._copier.join(_PIPE)  # a grandchild may keep the pipe open
        status = status if status >= 0 else 128 - status
        record = {"status": status, "began": round(self._began, 3), "ended": round(time.time(), 3)}
        self.log.with_suffix(".exit.json").write_text(json.dumps(record) + "\n")
        return status


def _copy(source: BinaryIO, log: Path) -> None:
    with log.open("ab", buffering=0) as file:
        while part := os.read(source.fileno(), 1 << 16):
            file.write(part)
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()


class Stop:
    """True once SIGTERM or SIGINT has come; the child gets SIGTERM at once."""

    def __init__(self) -> None:
        self.requested = False
        self.child: Child | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        self.requested = True
        if self.child is not None:
            self.child.terminate()


def run_command(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    stop: Stop,
    folder: Path | None = None,
    beside: threading.Thread | None = None,
) -> int:
    """Run a command to its end, in a folder, and a thread beside it; 143 where it was asked to stop."""
    stop.child = Child(command, log, environment, folder)
    if stop.requested:
        stop.child.terminate()
    if beside is not None:
        beside.start()
    status = stop.child.wait()
    return STOPPED if stop.requested and status != USER_ERROR else status


def run_head(arguments: argparse.Namespace, log: Path, environment: Mapping[str, str], stop: Stop) -> int:
    """Start Ray and the command, which imports its code while Ray starts; tell the nodes when the run has ended."""
    ended = ended_path(arguments.run_dir)
    ended.unlink(missing_ok=True)  # before a node can find us
    host = own_address(environment)
    start = ["ray", "start", "--head", f"--node-ip-address={host}", f"--port={arguments.port}", "--block"]
    start += ["--include-dashboard=false", "--no-monitor", "--labels=axl-role=head", *_QUIET]
    ray = Child(start, log.with_suffix(".ray.log"), {**_RAY, **environment})
    environment = {**environment, "RAY_ADDRESS": f"{host}:{arguments.port}", "AXL_RAY_NODES": str(arguments.nodes)}
    lost = threading.Event()
    beside = threading.Thread(target=_end_without, args=(ray, stop, lost), daemon=True)
    try:
        status = run_command(arguments.command, log, environment, stop, beside=beside)
        if status == USER_ERROR and not stop.requested:  # the experiment's, or that of a Ray which has died
            _wait_until(lambda: ray.poll() is not None, _SEEN)
            beside.join(_PIPE)
        # Without Ray the command stops as if it was asked to, with status 0, which would be the end of the run.
        if (lost.is_set() or (status and ray.poll() is not None)) and not stop.requested:
            raise Wrong(f"ray start ended with status {ray.poll()}; its last words are above and in {ray.log}")
        if status in (0, USER_ERROR):  # a restart would change nothing
            ended.write_text(json.dumps({"status": status, "time": time.time()}) + "\n")
    finally:
        ray.terminate()
        ray.wait(_RAY_END)
    return status


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL)


def _end_without(ray: Child, stop: Stop, lost: threading.Event) -> None:
    """End the command if Ray, for which it waits or which it needs, ends before it."""
    command = stop.child
    while command is not None and command.poll() is None:
        if ray.poll() is not None:
            lost.set()
            command.terminate()
            _wait_until(lambda: command.poll() is not None, _WITHOUT_RAY)
            return command.kill()
        time.sleep(_POLL)


def run_node(arguments: argparse.Namespace, log: Path, environment: Mapping[str, str], stop: Stop) -> int:
    """Add this machine to the head's cluster until the run has ended; on SIGTERM let its roles hand back first."""
    ended = ended_path(arguments.run_dir)
    if not _find(arguments.head, lambda: stop.requested or ended.exists()):
        return STOPPED if stop.requested else 0
    start = ["ray", "start", f"--address={arguments.head}", f"--node-ip-address={own_address(environment)}", "--block"]
    start.append(f"--labels=axl-role={arguments.role}")  # by which the roles find their machines
    added = arguments.mode == "added"  # its chips are the command's, which Ray knows nothing of
    start += ["--resources", '{"TPU": 0}'] if added else _rehearsed(arguments, environment)
    if folder := environment.get("RAY_TMPDIR"):  # by default a node uses the path that the head's machine has
        start.append(f"--temp-dir={folder}")
    ray = Child([*start, *_QUIET], log.with_suffix(".ray.log") if added else log, {**_RAY, **environment})
    if added:
        return _run_added(arguments, log, environment, stop, ray)
    while ray.poll() is None and not stop.requested and not ended.exists():
        time.sleep(_POLL)
    if stop.requested:
        _hand_back(ray.pid)
    ray.terminate()
    ray.wait(_RAY_END)
    return STOPPED if stop.requested else 0 if ended.exists() else 1


def _run_added(arguments: argparse.Namespace, log: Path, environment: Mapping[str, str], stop: Stop, ray: Child) -> int:
    """Run the command of an added worker, which hands back by itself; it may come before the run has begun."""
    try:
        cluster = arguments.run_dir / "cluster.json"  # is there while the run is active
        while not cluster.exists() and not stop.requested and not ended_path(arguments.run_dir).exists():
            time.sleep(_POLL)
        if cluster.exists() and not stop.requested:
            run_command(arguments.command, log, environment, stop)
    finally:
        ray.terminate()
        ray.wait(_RAY_END)
    return STOPPED if stop.requested else 0 if ended_path(arguments.run_dir).exists() else _RESTART


def _rehearsed(arguments: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Return what makes Ray believe in the chips of a slice where CPUs stand in for them; it cannot see them."""
    if not arguments.chips or environment.get("JAX_PLATFORMS") != "cpu":
        return []
    return ["--resources", json.dumps({"TPU": arguments.chips})]


def own_address(environment: Mapping[str, str]) -> str:
    """Return the address of this machine in the cluster's network."""
    return environment.get("POD_IP") or socket.gethostbyname(socket.gethostname())


def ended_path(run_dir: Path) -> Path:
    """Return the file that says that the run has ended for good."""
    return run_dir / "launch" / "ended.json"


def _find(address: str, given_up: Callable[[], bool]) -> bool:
    """Wait until something listens at an address; False: there is no more reason to."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _FIND_HEAD
    while time.monotonic() < deadline:
        if given_up():
            return False
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
            return True
        except OSError:
            time.sleep(_POLL)
    raise Wrong(f"nothing listens at {address} within {_FIND_HEAD:.0f} s")


def _hand_back(ray: int) -> None:
    """Ask the roles that this `ray start` has on its machine to hand back their work, and wait for them."""
    import psutil

    try:
        started = psutil.Process(ray).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    roles: list[psutil.Process] = []
    for process in started:
        try:
            if _is_role(process.cmdline()):
                process.terminate()
                roles.append(process)
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(roles, timeout=_HAND_BACK)


def _is_role(command: Sequence[str] | None) -> bool:
    return bool(command) and command[0].startswith("ray::RoleHost")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the arguments."""
    own, command = list(arguments), list[str]()
    if "--" in own:
        cut = own.index("--")
        own, command = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tools.launch.process")
    parser.add_argument("mode", choices=["train", "command", "head", "node", "added"])
    parser.add_argument("--name", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--chips", type=int, default=0)
    parser.add_argument("--port", type=int, default=6379)
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--meet")
    parser.add_argument("--head")
    parser.add_argument("--role", default="worker")
    found = parser.parse_args(own)
    found.command = command
    return found


def main(arguments: Sequence[str]) -> int:
    """Run a process and return its exit status."""
    given, stop = parse(arguments), Stop()
    try:
        index = check_machine(given, os.environ)
        for line in machine_lines(os.environ):
            print(f"axl: {line}", flush=True)
        log = given.run_dir / "launch" / "logs" / f"{given.name}-{index}.log"
        if given.mode == "head" or given.mode == "train" and index == 0:
            release_lock(given.run_dir, socket.gethostname())
        if given.mode == "head":
            return run_head(given, log, os.environ, stop)
        if given.mode in ("node", "added"):
            return run_node(given, log, os.environ, stop)
        count = given.hosts * given.slices
        if given.meet:
            given.command += ["--processes", str(count), "--process", str(index), "--meet", given.meet]
        return run_command(given.command, log, os.environ, stop, given.folder)
    except Wrong as error:
        print(f"axl: {error}", file=sys.stderr)
        return STOPPED if stop.requested else _RESTART


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
