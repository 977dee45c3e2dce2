"""Hosts that are namespaces of this machine: each has an address, a shared memory and Ray files of its own, and a cable
to a switch, which can be pulled. The other files are common to all, as on a cluster with a shared folder.
"""

import os
import shutil
import subprocess
from types import TracebackType

_NETWORK = "10.77.0"
_ENTER = ("nsenter", "--user", "--net", "--mount", "--preserve-credentials", "--target")
_SWITCH = "ip link add switch type bridge && ip link set switch up"
_OWN = "mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray"
_STAY = "echo there; exec sleep infinity"


def permitted() -> bool:
    """Whether this machine lets us make namespaces, and has the tools."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    words = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _SWITCH]
    return subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


class Hosts:
    """So many hosts, numbered from 1; nothing of them is left at the end of the `with` block, if no command runs."""

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
        """What to write before a command for it to run on that host; 0: on the switch."""
        return [*_ENTER, str(self._holders[number].pid)]

    def holds(self, number: int, pid: int) -> bool:
        """Whether a process lives on that host."""
        return _network_of(pid) == _network_of(self._holders[number].pid)

    def pull(self, number: int) -> None:
        """From now on nothing reaches the host, and nothing comes from it."""
        self._run(0, f"ip link set cable{number} down")

    def plug(self, number: int) -> None:
        self._run(0, f"ip link set cable{number} up")

    def _hold(self, words: list[str], prepare: str) -> None:
        """A process that keeps the namespaces."""
        command = [*words, "sh", "-c", f"{prepare} && {{ {_STAY}; }}"]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        self._holders.append(holder)
        assert holder.stdout.readline() == "there\n", f"{command} ended with {holder.wait()}"

    def _run(self, number: int, script: str) -> None:
        subprocess.run([*self.on(number), "sh", "-c", script], check=True)


def _network_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")
