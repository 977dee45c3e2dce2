"""Ray for the length of a run, silent and on loopback only; and the health of its own processes."""

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray

from mesh import UserError
from mesh.files.written import own_folder
from rl.runtime.node.drivers import Kept, kept_ray
from rl.runtime.node.local_ray import LocalRay
from rl.runtime.node.start import few_processes

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_KEPT_SESSIONS = 4  # sessions of failed runs kept for their logs
_PURPOSE = {"raylet": "which starts the roles", "gcs_server": "which knows where the roles are"}


@contextmanager
def ray_session(address: str | None = None) -> Iterator[bool]:
    """Join the cluster at `address` or `RAY_ADDRESS`, or start one on loopback; yields True if it was started here.

    A session that is already open is used, and left open. One that this driver's command keeps counts as started here.

    Raises:
        UserError: there is no cluster at that address, or it refuses the connection.
        SessionLost: Ray could not be started here.
    """
    if ray.is_initialized():
        yield False
        return
    own = address is None and not os.environ.get("RAY_ADDRESS")
    kept = kept_ray() if own else None
    with _signals_kept(), warnings.catch_warnings():
        # Ray starts its processes by fork and exec, and JAX warns of every fork; nothing runs between the two.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
        if kept is not None:
            session = _join_kept(kept)
        else:
            session = _start() if own else _join(address or os.environ["RAY_ADDRESS"])
    try:
        yield own
    except BaseException:
        ray.shutdown()
        raise
    ray.shutdown()
    if session is not None:
        shutil.rmtree(session, ignore_errors=True)  # Ray's logs matter after errors only


def session_folder() -> Path:
    """Return the folder of the sessions that this user's runs start, with Ray's logs of those that ended in an error.

    Not the directory of temporary files if that has another path than /tmp: sockets need short paths.
    """
    return Path("/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()) / f"axl-ray-{os.getuid()}" / "ray"


def _start() -> str:
    """Start Ray; returns its session's directory (SessionLost: a process died on the way, or did not answer)."""
    folder = _folder()
    try:
        with few_processes():
            context: Any = ray.init(
                "local",  # own cluster, not the last one started on this machine
                num_cpus=64,  # roles are processes, not cores: Ray must not limit them on one machine
                include_dashboard=False,
                object_store_memory=256 << 20,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder),
                **_QUIET,
            )
    except Exception as error:
        ray.shutdown()
        raise _not_started(error) from error
    return context.address_info["session_dir"]


def _folder() -> Path:
    """Make the folder of sessions, and remove old ones in it."""
    folder = session_folder()
    own_folder(folder.parent)  # Ray opens its own folder to everyone
    folder.mkdir(exist_ok=True)
    _remove_old_sessions(folder)
    return folder


def _not_started(error: Exception) -> "SessionLost":
    return SessionLost(f"Ray did not start: {next(iter(str(error).splitlines()), type(error).__name__)}")


def keep_session(kept: Kept, raylets: int, replaced: Callable[[int, int, int], object]) -> None:
    """Start Ray, tell where, and hold it until it cannot go on or SIGTERM comes; `replaced`: see `LocalRay.hold`."""
    folder = _folder()
    try:
        here = LocalRay(folder, raylets)
    except Exception as error:
        raise _not_started(error) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())

    def tell() -> None:
        kept.tell(keeper=os.getpid(), **here.told())

    try:
        tell()
        kept.tell(lost=_died(here.hold(tell, replaced)))
        here.end(graceful=False)
    except SystemExit:
        here.end(graceful=True)


def _join_kept(kept: Kept) -> None:
    """Join the session that the command keeps (SessionLost: Ray did not start, or has died again)."""
    found = kept.wait()
    try:
        if "error" in found:
            raise SessionLost(found["error"])
        ray.init(found["address"], _node_ip_address="127.0.0.1", **_QUIET)
    except (ConnectionError, RuntimeError) as error:
        ray.shutdown()
        raise SessionLost(f"Ray was gone: {error}") from error


def _remove_old_sessions(folder: Path) -> None:
    """Remove all but the newest sessions of processes that have ended."""
    ended = [path for path in folder.glob("session_*_*") if not psutil.pid_exists(int(path.name.rsplit("_", 1)[1]))]
    for path in sorted(ended)[:-_KEPT_SESSIONS]:
        shutil.rmtree(path, ignore_errors=True)


def _join(address: str) -> None:
    # Processes of a launched run have loopback addresses of their own.
    here = {"_node_ip_address": os.environ.get("POD_IP", "127.0.0.1")} if address.startswith("127.") else {}
    try:
        ray.init(address, **here, **_QUIET)
    except (ConnectionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"cannot join the Ray cluster at {address} from this machine: {reason} (a cluster that was started with a "
            "token, as by `ray start` where ~/.ray/auth_token exists, needs RAY_AUTH_MODE=token and the same token "
            "here)"
        ) from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep our handler of SIGTERM, which saves first; `ray.init` installs one that exits at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


class SessionLost(Exception):
    """A process of Ray itself has died: this driver cannot use its session any more.

    Attributes:
        step: updates completed before.
        others: raylets, and roles with them, that live on.
    """

    step = 0

    def __init__(self, message: str, others: int = 0):
        super().__init__(message)
        self.others = others


class SessionHealth:
    """Ray's own processes that this driver needs: the `raylet` of its node, and `gcs_server` if that runs here too.

    Without them no role can live or be restarted.
    """

    def __init__(self):
        """Find them (SessionLost: the raylet died since this driver joined it)."""
        node, kept = ray.get_runtime_context().get_node_id(), kept_ray()
        self._others = 0  # raylets with roles that live on where this one dies
        try:
            if kept is None:
                known = {process: _ray_name(process, node) for process in psutil.process_iter()}
                self._processes = {process: name for process, name in known.items() if name is not None}
            else:
                told = kept.told()
                pids = {told["raylets"][node]: "raylet", told["gcs_server"]: "gcs_server"}
                self._processes = {psutil.Process(pid): name for pid, name in pids.items()}
                self._others = told["sides"] - 1
        except (KeyError, psutil.NoSuchProcess):
            raise SessionLost("Ray's raylet, which starts the roles, died") from None

    def loss(self) -> SessionLost | None:
        """Return an error that names the process which has died, without asking Ray; None if all live."""
        for process, name in self._processes.items():
            if not _lives(process):
                kept = kept_ray()  # keeper of the session: it knows which one died first, and has ended the others
                lost = (kept and kept.told().get("lost")) or _died(f"{name} (pid {process.pid})")
                return SessionLost(lost, others=self._others if name == "raylet" else 0)
        return None

    def check(self) -> None:
        """Raise SessionLost if a process has died."""
        if (lost := self.loss()) is not None:
            raise lost

    def end(self) -> None:
        """Kill the processes that are left, because Ray would try for long to reach the dead one."""
        left = [process for process in self._processes if _lives(process)]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5.0)


def _died(process: str) -> str:
    return f"Ray's {process}, {_PURPOSE[process.partition(' ')[0]]}, died"


def _ray_name(process: psutil.Process, node: str) -> str | None:
    """Return the name of a Ray process of this node, else None; Ray's agents too have the node's id as argument."""
    try:
        name = process.name()
        return name if name in _PURPOSE and node in " ".join(process.cmdline()) else None
    except psutil.Error:
        return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
