"""Ray for the length of a run, silent and on loopback only; and the health of its own processes."""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray

from mesh import UserError

_PURPOSE = {"raylet": "which starts the roles", "gcs_server": "which knows where the roles are"}


@contextmanager
def ray_session(address: str | None = None) -> Iterator[bool]:
    """Join the cluster at `address` or `RAY_ADDRESS`, or start one on loopback; yields True if it was started here.

    A session that is already open is used, and left open.

    Raises:
        UserError: there is no cluster at that address, or it refuses the connection.
    """
    if ray.is_initialized():
        yield False
        return
    own = address is None and not os.environ.get("RAY_ADDRESS")
    with _signals_kept(), warnings.catch_warnings():
        # Ray starts its processes by fork and exec, and JAX warns of every fork; nothing runs between the two.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not own:
            _join(address or os.environ["RAY_ADDRESS"], quiet)
        else:
            ray.init(
                "local",  # not the Ray cluster that was started last on this machine
                num_cpus=64,  # roles are processes, not cores: Ray must not limit them on one machine
                include_dashboard=False,
                object_store_memory=256 << 20,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
    try:
        yield own
    finally:
        ray.shutdown()


def _join(address: str, quiet: dict[str, Any]) -> None:
    if address.startswith("127."):
        quiet = {**quiet, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(address, **quiet)
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
    """A process of Ray itself has died: this session cannot be used any more.

    Attributes:
        step: updates completed before.
    """

    step = 0


class SessionHealth:
    """Ray's own processes on the driver's node: its `raylet`, and `gcs_server` if that runs here too.

    Without them no role can live or be restarted.
    """

    def __init__(self):
        node = ray.get_runtime_context().get_node_id()
        self._processes = {p: name for p in psutil.process_iter() if (name := _ray_name(p, node)) is not None}

    def loss(self) -> SessionLost | None:
        """Return an error that names the process which has died, without asking Ray; None if all live."""
        for process, name in self._processes.items():
            if not _lives(process):
                return SessionLost(f"Ray's {name} (pid {process.pid}), {_PURPOSE[name]}, died")
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
