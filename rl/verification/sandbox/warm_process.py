"""A warm process and the boxes that are forked from it, as their caller sees them."""

import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, override

from axlearn_like.config import ConfigBase, config_items
from axlearn_like.config.consent import UNISOLATED
from axlearn_like.run.scratch import make_scratch
from mesh.errors import UserError
from rl.verification.sandbox.values import receive, send

_BACKENDS = ("auto", "namespaces", "landlock")
Ended = Literal["done", "timeout", "crash", "output", "lost", "killed"]

_BEFORE = ""  # run early by a warm process; tests make the machine refuse by it
_PROJECT = str(Path(__file__).resolve().parents[3])
_PRELOAD = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json"),
    *("math", "operator", "random", "re", "statistics", "string", "typing"),
)
_START_S = 60.0  # limit until a process is warm
_REPLY_S = 5.0  # limit until a process says that a box has ended, which it has killed
REAP_S = 0.4  # seconds after a kill; then the whole warm process goes
_FIRST_USER = 1_879_048_192  # first user id of root's boxes; none has a name


class SandboxError(UserError):
    """Failure of the sandbox itself: the machine offers no isolation, or the process that holds the boxes has died."""


class SandboxKilled(SandboxError):
    """Death of the process that holds the boxes: nothing that is isolated in one can cause it."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """The end of a program: how, its standard output, what was said about it, and the seconds that it took."""

    ended: Ended
    passed: bool = False
    output: str = ""
    error: str = ""
    seconds: float = 0.0


class Limits[T](ConfigBase[T]):
    """Limits of a box, and what keeps it apart."""

    deadline_s: float = 5.0  # wall-clock seconds of a program
    memory_mb: int = 512  # address space of each process of a program
    disk_mb: int = 16  # size of its folder for temporary files, which is memory: $TMPDIR, where it starts
    tasks: int = 8  # processes and threads that it may have
    output_kb: int = 256  # standard output; a program that prints more is ended
    # Isolation by namespaces, else by Landlock, or by the one that is named. Landlock grants no TMPDIR.
    backend: Literal["auto", "namespaces", "landlock"] = "auto"
    # Run code with nothing but limits and the filter of system calls where the kernel allows no isolation. It can
    # then read and change what this user can.
    allow_unisolated: bool = False

    @override
    def reaches(self) -> tuple[str, ...]:
        return (UNISOLATED,) if self.allow_unisolated else ()

    @override
    def check_fields(self) -> None:
        self.require_least(1, "memory_mb", "disk_mb", "tasks", "output_kb")
        self.require("deadline_s", self.deadline_s > 0, "seconds, more than 0")
        self.require("backend", self.backend in _BACKENDS, f"one of {', '.join(_BACKENDS)}")


class Box(NamedTuple):
    """A box, by its number, and the channel to what runs in it."""

    number: int
    channel: socket.socket


class WarmProcess:
    """A warm process, and the boxes forked from it for one program at a time."""

    def __init__(self, limits: Limits[Any]):
        self._limits, self._number = limits, 0
        self._boxes: dict[int, Box] = {}
        self._ended: dict[int, int] = {}
        self.broken = False
        self._scratch = str(make_scratch("box"))
        self.isolation = ""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            "scratch": self._scratch,
            "hidden": [_PROJECT, os.getcwd(), *_user_folders()],
            "preload": _PRELOAD,
            "user": _FIRST_USER + int.from_bytes(os.urandom(4)) % (1 << 27),
            "cpu_s": int(limits.deadline_s) + 1,
            **dict(config_items(limits)),
        }
        code = (
            f"import sys; sys.path.insert(0, {_PROJECT!r}); sys.dont_write_bytecode = True\n{_BEFORE}"
            "from rl.verification.sandbox.zygote import main; main(sys.argv[1:])"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", code, str(theirs.fileno()), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        try:
            hello = self._hear(deadline := time.monotonic() + _START_S)
            if hello is None or "ready" not in hello:
                why = "the process has ended" if hello is None else hello.get("refused", "it does not answer")
                ended = hello is None and time.monotonic() < deadline
                raise (SandboxKilled if ended else SandboxError)(
                    f"code cannot be isolated on this machine: {why}; expected Linux with user namespaces, or root, or "
                    f"Linux 6.12 with Landlock (Sandbox.Config.backend={limits.backend!r}). "
                    "Sandbox.Config.allow_unisolated=True runs it all the same; it may read and change your files"
                )
        except BaseException:
            self.end()
            raise
        self.isolation = str(hello["ready"])
        if "namespaces" in self.isolation or "landlock" in self.isolation:  # root folder was only a mount point
            shutil.rmtree(self._scratch, ignore_errors=True)

    def start(self, mode: str, descriptors: Sequence[int]) -> Box:
        """Fork a box that waits for its job."""
        ours, theirs = socket.socketpair()
        self._number += 1
        box = self._boxes[self._number] = Box(self._number, ours)
        message = json.dumps({"box": self._number, "mode": mode}).encode()
        with theirs:
            self._send(message, [theirs.fileno(), *descriptors])
        return box

    def give(self, box: Box, job: dict[str, Any]) -> None:
        """Send a box its job; one that has died already says so by its end."""
        box.channel.settimeout(self._limits.deadline_s)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            send(box.channel, job)

    def watch(self, box: Box, job: dict[str, Any], seconds: float, output: Any = None) -> Outcome:
        """Give a box its job, wait for its end or its deadline, and say how it went."""
        began = time.monotonic()
        self.give(box, job)
        printed, late = self._wait(box, began + seconds, output)
        passed = time.monotonic() - began
        if late:
            return Outcome("timeout", output=printed or "", error=f"not done after {seconds:g} s", seconds=passed)
        if printed is None:
            return Outcome("output", error=f"more than {self._limits.output_kb} KiB of output", seconds=passed)
        code = self._ended.get(box.number)
        verdict = self._verdict(box)
        if output is None:
            done = "passed" in verdict
            error = str(verdict.get("error", "the process has ended"))[:500]
            return Outcome(
                "done" if done else "crash", passed=verdict.get("passed") is True, error=error, seconds=passed
            )
        error = str(verdict.get("error", "") if code else "")[:500] or (f"exit status {code}" if code else "")
        return Outcome("done", passed=code == 0, output=printed, error=error, seconds=passed)

    def kill(self, box: Box) -> None:
        """Kill a box with all that runs in it; returns at once."""
        box.channel.close()
        self._send(json.dumps({"kill": box.number}).encode())

    def drain(self, awaited: Box | None = None) -> bool:
        """Take note of boxes that have ended, and forget them; `awaited` is being killed, and its end is waited for.

        Returns:
            False if the process has died, and cannot say that `awaited` has ended.
        """
        deadline = time.monotonic() + (0.0 if awaited is None else _REPLY_S)
        while awaited is None or awaited.number in self._boxes:
            if (message := self._hear(deadline)) is None:
                return time.monotonic() >= deadline
            self._boxes.pop(message.get("ended", 0), None)
        return True

    def clear(self) -> None:
        """Kill what is left of a program, and wait until it is gone."""
        for number in [*self._boxes]:
            if number not in self._ended:
                self._send(json.dumps({"kill": number}).encode())
        deadline = time.monotonic() + REAP_S
        while self._boxes.keys() - self._ended.keys():
            if (message := self._hear(deadline)) is None:
                self.broken = True
                break
            self._note(message)
        for box in self._boxes.values():
            box.channel.close()
        self._boxes.clear()
        self._ended.clear()

    def end(self) -> None:
        """Kill the process and with it all boxes."""
        self._control.close()  # no namespaces: it kills its own boxes
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not self.isolation.startswith("namespaces"):
                self._process.wait(REAP_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for box in self._boxes.values():
            box.channel.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _wait(self, box: Box, deadline: float, output: Any) -> tuple[str | None, bool]:
        """Return what was printed, None if that is too much, and whether the deadline passed before the end."""
        printed = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            if output is not None:
                selector.register(output, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    return printed.decode("utf-8", "replace"), True
                for key, _ in ready:
                    if key.fileobj is self._control:
                        if (message := self._hear(deadline)) is None:
                            raise SandboxKilled("the process that holds the boxes has ended")
                        self._note(message)
                    elif piece := os.read(key.fd, 1 << 16):
                        printed += piece
                        if len(printed) > self._limits.output_kb << 10:
                            return None, False
                    else:
                        selector.unregister(key.fileobj)
                        output = None
                if box.number in self._ended:
                    while output is not None and (piece := _read_now(output.fileno())):
                        printed += piece
                    return printed.decode("utf-8", "replace"), False

    def _verdict(self, box: Box) -> dict[str, Any]:
        box.channel.settimeout(0.2)
        try:
            message = receive(box.channel)
        except (ValueError, TimeoutError):
            message = None
        return message if isinstance(message, dict) else {}

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._control, [message], descriptors)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise SandboxKilled("the process that holds the boxes has ended") from error

    def _hear(self, deadline: float) -> dict[str, Any] | None:
        self._control.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = self._control.recv(1 << 16)
        except (TimeoutError, ConnectionResetError):
            return None
        return json.loads(data) if data else None

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("ended") in self._boxes:
            self._ended[message["ended"]] = int(message["code"])


def _read_now(descriptor: int) -> bytes:
    """Read what is in a pipe, without waiting for more."""
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def _user_folders() -> list[str]:
    """Return the folders of the import path that hold a user's code, not packages: a box does not see them."""
    packages = (sys.prefix, sys.base_prefix)
    return [path for path in sys.path if path and not path.startswith(packages)]
