"""Checks run in processes of their own, each with a deadline: a crash or a hang is a result, and the next one goes on.

Run as a program, this module is such a process: it writes a line of JSON for each check to a pipe.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from axlearn_like.run.child_group import ChildGroup
from mesh.errors import UserError
from tools.bench.doctor.checks import Check, Finding

_ROOT = Path(__file__).resolve().parents[3]  # holds the package `tools`, in a checkout and where installed
_CRASHED = "often a driver, plugin or jaxlib that do not fit each other: see the checks versions and devices"
_KILLED = {
    "SIGKILL": "often the kernel's out-of-memory killer (dmesg | tail): free memory, or raise the container's limit",
    "SIGBUS": "often a full /dev/shm or disk: see the checks shared_memory and disk",
    "SIGILL": "a package was built for another processor: install constraints.txt in a new environment",
}
_HANGS = "another process may keep this machine busy; run it alone: axl doctor --only "
_NO_DEVICE = (
    "another process may hold the devices (fuser -v /dev/accel* /dev/vfio/* /dev/nvidia*), or this is one host of a "
    "slice, which waits for all: run axl doctor on every host at once"
)
_BUG = "axl --debug doctor --only NAME shows where; send its output"


def run_checks(
    checks: Mapping[str, Check], options: Mapping[str, Any], seconds: float
) -> Iterator[tuple[str, Finding]]:
    """Yield name and finding of each check, in order.

    Args:
        checks: the checks, those of one process beside each other.
        options: what they are told.
        seconds: deadline of all together; checks that have no time left are skipped.
    """
    ends, waiting, lost = time.monotonic() + seconds, dict(checks), False
    while waiting:
        kind = next(iter(waiting.values())).process
        own = {name: check for name, check in waiting.items() if check.process == kind}
        with _Worker([check.place for check in own.values()], options) as worker:
            for name, check in own.items():
                del waiting[name]
                left = ends - time.monotonic()
                if kind == "device" and lost:
                    found = Finding("skip", "the check devices failed", "solve that first")
                elif left <= 0:
                    found = Finding("skip", f"no time left of {seconds:g} s", "axl doctor --seconds gives more")
                else:
                    found = worker.next(name, min(check.seconds, left))
                lost |= name == "devices" and found.status == "fail"
                yield name, found
                if worker.ended:
                    break


class _Worker:
    """A process that runs checks; killed with all of its own at the end of the block."""

    def __init__(self, places: list[str], options: Mapping[str, Any]):
        self._said = tempfile.TemporaryFile()
        said: Any = sys.stderr if options.get("debug") else self._said
        self._replies, other = os.pipe()
        self._text, self.ended = b"", False
        self._child = ChildGroup(
            [sys.executable, "-P", "-m", "tools.bench.doctor.run", json.dumps([places, dict(options)]), str(other)],
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            pass_fds=[other],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            grace=2.0,
        )
        os.close(other)

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill_group()
        os.close(self._replies)
        self._said.close()

    def next(self, name: str, seconds: float) -> Finding:
        """Return the next result; a failure if there is none within so many seconds, or the process ends."""
        ends = time.monotonic() + seconds
        while b"\n" not in self._text and not self.ended:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                self.ended = True
                do = _NO_DEVICE if name == "devices" else _HANGS + name
                return Finding("fail", f"did not end in {seconds:.3g} s", do, seconds=seconds)
            self._text += (more := os.read(self._replies, 1 << 16))
            self.ended = not more
        if self.ended:
            return self._how_it_ended()
        line, _, self._text = self._text.partition(b"\n")
        return Finding(*json.loads(line))

    def _how_it_ended(self) -> Finding:
        status = self._child.wait()
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            return Finding("fail", f"its process was killed by {name}", _KILLED.get(name, _CRASHED))
        self._said.seek(0)
        last = self._said.read().decode(errors="replace").strip().rpartition("\n")[2]
        return Finding("fail", f"its process ended with status {status}: {last}", _CRASHED)


def run_check(place: str, options: Mapping[str, Any]) -> Finding:
    """Return what a check finds; an error that it raises is a failure."""
    began = time.monotonic()
    module, _, name = place.partition(":")
    try:
        found: Finding = getattr(import_module(module), name)(options)
    except UserError as error:
        found = Finding("fail", str(error), f"docs/reference/doctor.md, {name}")
    except Exception as error:  # whatever a driver, a compiler or a disk raises is a result here
        traceback.print_exc()
        found = Finding("fail", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", _BUG)
    return found._replace(seconds=round(time.monotonic() - began, 2))


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[2]), "w", buffering=1) as replies:
        given = json.loads(sys.argv[1])
        for each in given[0]:
            replies.write(json.dumps(run_check(each, given[1])) + "\n")
