"""Ray for the length of a run, with our words only on the terminal and sockets on loopback only."""

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


@contextmanager
def ray_session(address: str | None = None) -> Iterator[bool]:
    """The cluster at `address` or `RAY_ADDRESS`, or one of our own on loopback: whether it is our own.

    A session that is open already is used and left open, as another's.

    Raises:
        UserError: there is no cluster at that address, or it does not let us in.
    """
    if ray.is_initialized():
        yield False
        return
    own = address is None and not os.environ.get("RAY_ADDRESS")
    with _signals_kept(), warnings.catch_warnings():
        # Ray starts its processes by fork and exec, JAX warns of every fork; nothing runs between the two.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not own:
            _join(address or os.environ["RAY_ADDRESS"], quiet)
        else:
            ray.init(
                "local",  # and not whatever Ray was started last on this machine
                num_cpus=64,  # roles are processes, not cores: placement on one machine is not Ray's to limit
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
        why = str(error).splitlines()[0]
        raise UserError(
            f"cannot join the Ray cluster at {address} from this machine: {why} (one that was started with a token, as "
            "`ray start` does where ~/.ray/auth_token exists, wants RAY_AUTH_MODE=token and the same token here)"
        ) from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """`ray.init` takes SIGTERM for an exit at once; ours saves first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


_WHAT = {"raylet": "which starts the roles", "gcs_server": "which knows where the roles are"}


class SessionLost(Exception):
    """A process of Ray's own has died: this session is of no more use, whatever its calls say.

    Attributes:
        step: updates completed before.
    """

    step = 0


class SessionHealth:
    """Of the node that the driver is connected to: its `raylet`, and `gcs_server` if that runs here too."""

    def __init__(self):
        node = ray.get_runtime_context().get_node_id()
        self._processes = {p: name for p in psutil.process_iter() if (name := _ray_name(p, node)) is not None}

    def loss(self) -> SessionLost | None:
        """What has been lost, as far as can be seen without asking Ray."""
        for process, name in self._processes.items():
            if not _lives(process):
                return SessionLost(f"Ray's {name} (pid {process.pid}), {_WHAT[name]}, died")
        return None

    def check(self) -> None:
        """Raises SessionLost."""
        if (lost := self.loss()) is not None:
            raise lost

    def end(self) -> None:
        """End those that are left: Ray would try for long to talk to the dead."""
        left = [process for process in self._processes if _lives(process)]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5.0)


def _ray_name(process: psutil.Process, node: str) -> str | None:
    """Whether it is one of them; the node's number is in its arguments, but also in those of Ray's agents."""
    try:
        name = process.name()
        return name if name in _WHAT and node in " ".join(process.cmdline()) else None
    except psutil.Error:
        return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
