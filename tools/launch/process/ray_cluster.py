"""The Ray cluster of a launched run: its head with the run's command, its nodes, and workers that are added to it."""

import argparse
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from axlearn_like.run.scratch import scratch
from rl.runtime.node import RAY
from rl.runtime.node.worker import VARIABLE
from tools.launch.process.child import PIPE, POLL, STOPPED, USER_ERROR, Child, StopSignals, run_command
from tools.launch.process.machine import MachineError, own_address
from tools.launch.process.repeats import settled

_START = ("python", "-m", "rl.runtime.node.start", "start", "--block")
RESTART = 70  # exit status where a machine is not as expected; another may be
_SEEN = 2.0  # seconds until `ray start --block` ends after one of Ray's processes
_FIND_HEAD = 600.0  # seconds
# No monitor of an autoscaler, which there is none of, and none of logs: the driver reads no role's output by Ray.
_QUIET = ("--disable-usage-stats", "--log-color=false", "--include-log-monitor=false")
_RAY = {
    **RAY,
    "RAY_worker_maximum_startup_concurrency": "8",  # default is the number of cores: two of three services
    # A machine whose port refuses is lost after 1.2 s, not 15; one that is slow to answer has 10 s for each of four.
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_failure_threshold": "4",
}
GPU_MODEL = "AXL_REHEARSED_GPU"  # variable of a machine whose CPUs stand in for GPUs: their model, or nothing
_RAY_END = 10.0  # seconds
_WITHOUT_RAY = 30.0  # seconds for a command after Ray has died
_HAND_BACK = 12.0  # seconds that roles have, of the 15 that a spot machine gives


def run_head(arguments: argparse.Namespace, log: Path, environment: Mapping[str, str], stop: StopSignals) -> int:
    """Run the head of a cluster with the command of the run, to its end."""
    with _warm_interpreter(environment) as known:
        return _run_head(arguments, log, known, stop)


def _run_head(arguments: argparse.Namespace, log: Path, environment: Mapping[str, str], stop: StopSignals) -> int:
    """Start Ray and the command, which imports its code while Ray starts; tell the nodes when the run has ended."""
    ended = ended_path(arguments.run_dir)
    ended.unlink(missing_ok=True)  # nodes cannot find us yet
    host = own_address(environment)
    _head_path(arguments.run_dir).write_text(f"{host}:{arguments.port}")
    start = [*_START, "--head", f"--node-ip-address={host}"]
    start += [
        f"--port={arguments.port}",
        "--include-dashboard=false",
        "--no-monitor",
        "--labels=axl-role=head",
        *_QUIET,
    ]
    ray = Child(start, log.with_suffix(".ray.log"), {**_RAY, **environment})
    environment = {**environment, "RAY_ADDRESS": f"{host}:{arguments.port}", "AXL_RAY_NODES": str(arguments.nodes)}
    lost = threading.Event()
    beside = threading.Thread(target=_end_without, args=(ray, stop, lost), daemon=True)
    try:
        status = run_command(arguments.command, log, environment, stop, beside=beside)
        if stop.child is not None and ray.poll() is None:
            status = settled(status, stop.child, stop, arguments.run_dir)
        if status == USER_ERROR and not stop.requested:  # the experiment's, or that of a Ray which has died
            _wait_until(lambda: ray.poll() is not None, _SEEN)
            beside.join(PIPE)
        # Without Ray the command stops as if it was asked to, with status 0, which would be the end of the run.
        if (lost.is_set() or (status and ray.poll() is not None)) and not stop.requested:
            raise MachineError(f"ray start ended with status {ray.poll()}; its last words are above and in {ray.log}")
        if status in (0, USER_ERROR):  # a restart would change nothing
            ended.write_text(json.dumps({"status": status, "time": time.time()}) + "\n")
    finally:
        ray.terminate()
        ray.wait(_RAY_END)
    return status


@contextmanager
def _warm_interpreter(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the environment with the name of a socket, at which workers of this machine are forked.

    A node has an interpreter for it; at the head it is the command.
    """
    own = environment.get("RAY_TMPDIR")
    if own is not None:
        Path(own).mkdir(mode=0o700, parents=True, exist_ok=True)
    with scratch("warm", own) as folder:
        yield {**environment, VARIABLE: f"{folder}/socket"}


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(POLL)


def _end_without(ray: Child, stop: StopSignals, lost: threading.Event) -> None:
    """End the command if Ray, for which it waits or which it needs, ends before it."""
    command = stop.child
    while command is not None and command.poll() is None:
        if ray.poll() is not None:
            lost.set()
            command.terminate()
            _wait_until(lambda: command.poll() is not None, _WITHOUT_RAY)
            return command.kill()
        time.sleep(POLL)


def run_node(arguments: argparse.Namespace, log: Path, environment: Mapping[str, str], stop: StopSignals) -> int:
    """Add this machine to the head's cluster until the run has ended; on SIGTERM let its roles hand back first."""
    ended = ended_path(arguments.run_dir)
    head = _find(arguments, lambda: stop.requested or ended.exists())
    if head is None:
        return STOPPED if stop.requested else 0
    start = [*_START, f"--address={head}", f"--node-ip-address={own_address(environment)}"]
    # By which the roles find their machines, also those that replace lost ones.
    start.append(f"--labels=axl-role={arguments.role},axl-name={arguments.name}")
    added = arguments.mode == "added"  # chips belong to the command, unknown to Ray
    start += ["--resources", '{"TPU": 0}'] if added else _rehearsed(arguments, environment)
    if folder := environment.get("RAY_TMPDIR"):  # default is the path on the head's machine
        start.append(f"--temp-dir={folder}")
    with _warm_interpreter(environment) as known:
        mine = environment if added else known  # Ray places nothing on an added machine
        ray = Child([*start, *_QUIET], log.with_suffix(".ray.log") if added else log, {**_RAY, **mine})
        return _follow(arguments, log, environment, stop, ray)


def _follow(
    arguments: argparse.Namespace, log: Path, environment: Mapping[str, str], stop: StopSignals, ray: Child
) -> int:
    """Keep a node in the cluster until the run has ended, or it is asked to stop."""
    if arguments.mode == "added":
        return _run_added(arguments, log, environment, stop, ray)
    ended = ended_path(arguments.run_dir)
    while ray.poll() is None and not stop.requested and not ended.exists():
        time.sleep(POLL)
    if stop.requested:
        _hand_back(ray.pid)
    ray.terminate()
    ray.wait(_RAY_END)
    return STOPPED if stop.requested else 0 if ended.exists() else 1


def _run_added(
    arguments: argparse.Namespace, log: Path, environment: Mapping[str, str], stop: StopSignals, ray: Child
) -> int:
    """Run the command of an added worker, which hands back by itself; it may come before the run has begun."""
    try:
        cluster = arguments.run_dir / "cluster.json"  # is there while the run is active
        while not cluster.exists() and not stop.requested and not ended_path(arguments.run_dir).exists():
            time.sleep(POLL)
        if cluster.exists() and not stop.requested:
            launched = {**environment, "AXL_RAY_NODES": "0"}  # storage is trusted
            run_command(arguments.command, log, launched, stop)
    finally:
        ray.terminate()
        ray.wait(_RAY_END)
    return STOPPED if stop.requested else 0 if ended_path(arguments.run_dir).exists() else RESTART


def _rehearsed(arguments: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Return what makes Ray believe in the chips of a slice where CPUs stand in for them; it cannot see them."""
    if not arguments.chips or environment.get("JAX_PLATFORMS") != "cpu":
        return []
    if (model := environment.get(GPU_MODEL)) is not None:
        named = ["--resources", json.dumps({f"accelerator_type:{model}": 1})] if model else []
        return [f"--num-gpus={arguments.chips}", *named]
    return ["--resources", json.dumps({"TPU": arguments.chips})]


def ended_path(run_dir: Path) -> Path:
    """Return the file that says that the run has ended for good."""
    return run_dir / "launch" / "ended.json"


def _head_path(run_dir: Path) -> Path:
    """Return the file in which the head says where it listens, for platforms that do not know before."""
    return run_dir / "launch" / "head"


def _find(arguments: argparse.Namespace, given_up: Callable[[], bool]) -> str | None:
    """Return the head's address once something listens there; None: there is no more reason to."""
    deadline, path, address = time.monotonic() + _FIND_HEAD, _head_path(arguments.run_dir), ""
    while time.monotonic() < deadline:
        if given_up():
            return None
        try:
            address = arguments.head or path.read_text()
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=5.0).close()
            return address
        except (OSError, ValueError):
            time.sleep(POLL)
    raise MachineError(f"nothing listens at the head's address {address or path} within {_FIND_HEAD:.0f} s")


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
    return bool(command) and command[0].startswith("ray::RoleActor")
