"""A Pod as processes of this machine: its environment, its log, its end, and everything that it has started."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from axlearn_like.run.child_group import ChildGroup
from mesh.errors import UserError
from tools.launch.local.manifest import Container
from tools.launch.quoting import expand

MARK = "AXL_POD"  # variable that all processes of a Pod inherit
# A container does not inherit the shell from which it was submitted, but it has a home and a language.
_PASSED = re.compile(r"HOME|USER|LOGNAME|LANG|LC_\w+|TZ|XDG_\w+")


@dataclasses.dataclass(frozen=True)
class Place:
    """Machine, as one Pod sees it."""

    name: str
    namespace: str
    address: str  # own address on this machine's loopback interface
    labels: Mapping[str, str]  # labels that the downward API shows
    root: Path  # folder that stands for the container's own file system
    private: tuple[str, ...]  # paths in the container that lie there
    log: Path  # file of its output
    mark: str  # value of the variable by which its processes are known
    variables: Mapping[str, str]  # variables of the machine: devices, the platform's own


class Pod:
    """One process with everything that it starts, from its start to its end."""

    def __init__(
        self,
        container: Container,
        place: Place,
        grace: float,
        resolve: Callable[[str], str],
        secret: Callable[[str, str], str],
    ):
        """Start it.

        Args:
            grace: seconds between SIGTERM and SIGKILL.
            resolve: replaces names of Pods in a text by their addresses.
            secret: returns a value by the name of its Secret and of the key there.
        """
        self.place, self._grace, self.container = place, grace, container
        self.started, self.finished, self.status = time.time(), 0.0, -1
        self._kill_at: float | None = None
        paths = _paths(container, place)

        def here(text: str) -> str:
            return resolve(_with_paths(text, paths))

        environment = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        environment |= place.variables
        for one in container.env:
            value = _value(one, place, secret)
            environment[one["name"]] = here(expand(value, environment) if "value" in one else value)
        place.log.parent.mkdir(parents=True, exist_ok=True)
        with place.log.open("ab") as output:
            self._process = ChildGroup(
                [here(expand(word, environment)) for word in container.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, MARK: place.mark},
                cwd=_folder(place.root),
                grace=grace,
            )

    @property
    def pid(self) -> int:
        """The first process, which gets SIGTERM."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """True once nothing of it is left."""
        return self.finished > 0

    @property
    def stopping(self) -> bool:
        """True once it was asked to end."""
        return self._kill_at is not None

    def terminate(self) -> None:
        """Send SIGTERM; after the grace, everything is killed."""
        if self._kill_at is None and not self.ended:
            self._kill_at = time.monotonic() + self._grace
            if self._process.poll() is None:
                self._process.terminate()

    def poll(self) -> None:
        """Look whether it has ended. With its first process all others end, as in a container."""
        if self.ended:
            return
        status = self._process.poll()
        if status is None:
            if self._kill_at is None or time.monotonic() < self._kill_at:
                return
            self._process.kill()
            status = self._process.wait()
        kill_marked(self.place.mark)
        self.status = status if status >= 0 else 128 - status
        self.finished = time.time()

    def as_object(self) -> dict[str, Any]:
        """Return it as the cluster's API would."""
        phase = ("Succeeded" if self.status == 0 else "Failed") if self.ended else "Running"
        state: dict[str, Any] = {"running": {"startedAt": self.started}}
        if self.ended:
            reason = "Completed" if self.status == 0 else "Error"
            times = {"startedAt": self.started, "finishedAt": self.finished}
            state = {"terminated": {"exitCode": self.status, "reason": reason, **times}}
        return {
            "metadata": {
                "name": self.place.name,
                "namespace": self.place.namespace,
                "labels": dict(self.place.labels),
                "annotations": {"axl/pid": str(self.pid), "axl/log": str(self.place.log)},
            },
            "status": {
                "phase": phase,
                "podIP": self.place.address,
                "containerStatuses": [{"name": self.container.name, "state": state}],
            },
        }


def kill_marked(mark: str) -> None:
    """Kill every process with this mark, until there is none; a prefix that ends with a slash is of many."""
    deadline = time.monotonic() + 10.0
    while (found := list(marked(mark))) and time.monotonic() < deadline:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


def marked(mark: str) -> Iterator[int]:
    """Yield the processes whose environment has the mark."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # process has ended, or is another user's
        if any(one == wanted or (wanted[-1:] == b"/" and one.startswith(wanted)) for one in variables):
            yield int(folder.name)


def _paths(container: Container, place: Place) -> dict[str, str]:
    """Return where the paths of the container lie on this machine."""
    found = {path: str(place.root) + path for path in place.private}
    for path, source in container.mounts.items():
        found[path] = source if source is not None else str(place.root) + path
        Path(found[path]).mkdir(parents=True, exist_ok=True)
    return found


def _with_paths(text: str, paths: Mapping[str, str]) -> str:
    """Replace the container's paths in a text, where a path begins."""
    words = "|".join(sorted(map(re.escape, paths), key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])(?:{words})(?![\w.-])", lambda found: paths[found[0]], text) if words else text


def _value(one: Mapping[str, Any], place: Place, secret: Callable[[str, str], str]) -> str:
    if "value" in one:
        return one["value"]
    source = one.get("valueFrom", {})
    if "secretKeyRef" in source:
        return secret(source["secretKeyRef"]["name"], source["secretKeyRef"]["key"])
    path = source.get("fieldRef", {}).get("fieldPath", "")
    if found := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
        return place.labels.get(found[1], "")
    known = {"status.podIP": place.address, "metadata.name": place.name, "metadata.namespace": place.namespace}
    if path not in known:
        raise UserError(f"variable {one['name']}: {path or 'its source'} is not known to a cluster on this machine")
    return known[path]


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
