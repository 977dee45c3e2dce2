"""A child process with a group of its own, which ends with its parent, however the parent ends.

A group of its own keeps a terminal's Ctrl-C away from the child and lets all of it be killed at once. But then nothing
ends it when the parent is killed, by SIGKILL or by `timeout`. So a guard, which is a small shell, reads from
a pipe whose other end only the parent has: the end of the file is the end of the parent. (The kernel's own
PR_SET_PDEATHSIG is of Linux alone, comes when the *thread* that started the child ends, and reaches no grandchildren.)
"""

import contextlib
import os
import signal
import subprocess
from typing import Any, override

_GUARD = """
trap '' HUP INT TERM
read -r done && exit
kill -TERM "$1" 2>/dev/null
tenths=$2
while [ "$tenths" -gt 0 ] && kill -0 "$1" 2>/dev/null; do sleep 0.1; tenths=$((tenths - 1)); done
kill -KILL "-$1" 2>/dev/null
"""


class ChildGroup(subprocess.Popen[Any]):
    """`subprocess.Popen` with a session of its own. If the parent dies, it gets SIGTERM, then its group SIGKILL."""

    def __init__(self, command: Any, *, grace: float = 10.0, **options: Any):
        """Start the command; `grace` is how many seconds it has between the two signals, the rest is of Popen."""
        self._guard: subprocess.Popen[bytes] | None = None
        super().__init__(command, start_new_session=True, **options)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "axl-guard", str(self.pid), str(round(grace * 10))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @override
    def poll(self) -> int | None:
        status = super().poll()
        self._dismiss()
        return status

    @override
    def wait(self, timeout: float | None = None) -> int:
        status = super().wait(timeout)
        self._dismiss()
        return status

    def kill_group(self) -> None:
        """Kill the child and all of its group, and wait for it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def _dismiss(self) -> None:
        """End the guard of a child that has ended, whose number may soon be another process's."""
        guard, self._guard = (self._guard, None) if self.returncode is not None else (None, self._guard)
        if guard is not None:
            with contextlib.suppress(OSError):
                guard.communicate(b"done\n")
