"""Ray's own processes on this machine, without which no role can live or be started again."""

import psutil
import ray

_WHAT = {"raylet": "which starts the roles", "gcs_server": "which knows where the roles are"}


class SessionLost(Exception):
    """A process of Ray's own has died: this session is of no more use, whatever its calls say.

    Attributes:
        step: updates completed before.
    """

    step = 0


class SessionWatch:
    """Of the node that the driver is connected to: its `raylet`, and `gcs_server` if that runs here too."""

    def __init__(self):
        node = ray.get_runtime_context().get_node_id()
        self._processes = {p: name for p in psutil.process_iter() if (name := _name(p, node)) is not None}

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


def _name(process: psutil.Process, node: str) -> str | None:
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
