"""Hosts as namespaces of this machine: each has its own address, shared memory and Ray files, and a network cable.

The cable to the switch can be pulled. All other files are shared, as on a cluster with a shared folder.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from types import TracebackType

import psutil

# As in a shell: what rl.runtime.ray has set in this process is for Ray on loopback.
ENVIRON = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}

_NETWORK = "10.77.0"
_ENTER = ("nsenter", "--user", "--net", "--mount", "--preserve-credentials", "--target")
_SWITCH = "ip link add switch type bridge && ip link set switch up"
_OWN = "mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray"
_STAY = "echo there; exec sleep infinity"
_PORT = 6399
_QUICK = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}
_RAY = "from ray.scripts.scripts import main; main()"


def permitted() -> bool:
    """Return True if this machine permits namespaces and has the tools."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    words = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _SWITCH]
    return subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


class Hosts:
    """Hosts numbered from 1 to `count`. They are removed at the end of the `with` block, if no command runs on them."""

    def __init__(self, count: int):
        self._holders: list[subprocess.Popen[str]] = []
        self._hold(["unshare", "--user", "--map-root-user", "--net", "--mount"], _SWITCH)
        for number in range(1, count + 1):
            self._hold([*self.on(0), "unshare", "--net", "--mount"], _OWN)
            holder = self._holders[number].pid
            self._run(0, f"ip link add cable{number} type veth peer name eth0 netns {holder}")
            self._run(0, f"ip link set cable{number} master switch up")
            self._run(number, f"ip addr add {self.address(number)}/24 dev eth0")
            self._run(number, "ip link set eth0 up && ip link set lo up")

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def address(self, number: int) -> str:
        return f"{_NETWORK}.{number}"

    def on(self, number: int) -> list[str]:
        """Return the words that, before a command, make it run on that host; 0: on the switch."""
        return [*_ENTER, str(self._holders[number].pid)]

    def holds(self, number: int, pid: int) -> bool:
        """Return True if a process runs on that host."""
        return _network_of(pid) == _network_of(self._holders[number].pid)

    def pull(self, number: int) -> None:
        """Disconnect the host from the network."""
        self._run(0, f"ip link set cable{number} down")

    def plug(self, number: int) -> None:
        """Connect the host again."""
        self._run(0, f"ip link set cable{number} up")

    def _hold(self, words: list[str], prepare: str) -> None:
        """Start a process that keeps the namespaces alive."""
        command = [*words, "sh", "-c", f"{prepare} && {{ {_STAY}; }}"]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        self._holders.append(holder)
        assert holder.stdout.readline() == "there\n", f"{command} ended with {holder.wait()}"

    def _run(self, number: int, script: str) -> None:
        subprocess.run([*self.on(number), "sh", "-c", script], check=True)


def _network_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


@contextlib.contextmanager
def ray_node(hosts: Hosts, number: int) -> Iterator[str]:
    """Start Ray on a host, its head on the first; yields the address of the head."""
    address = f"{hosts.address(1)}:{_PORT}"
    first = ["--head", f"--port={_PORT}", f"--system-config={json.dumps(_QUICK)}", "--include-dashboard=false"]
    where = first if number == 1 else [f"--address={address}"]
    words = ["start", "--block", "--num-cpus=1", f"--node-ip-address={hosts.address(number)}", *where]
    command = [*hosts.on(number), sys.executable, "-c", _RAY, *words]
    environ = {**os.environ, **ENVIRON}
    node = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        time.sleep(5.0)
        yield address
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(node.pid).children(recursive=True):
                process.kill()
        node.kill()
        node.wait()
