"""A warm process from which boxes are forked, each in milliseconds and each thrown away after one program.

`python -m rl.verification.sandbox.zygote SOCKET SETTINGS`. It isolates itself once (see `isolation`), imports what
programs often need, and then forks boxes on request. A box is the first process of a pid namespace of its own, so that
everything that it has started ends with it; without namespaces (see `landlock`) it leads a process group that nothing
can leave, since the filter of calls refuses `setsid` and `setpgid`. What a box is to run never passes through this
process, whose memory later boxes inherit: the caller hands over descriptors, and each box reads its job by itself.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import stat
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from rl.verification.sandbox import box, isolation, landlock
from rl.verification.sandbox.calls import CallFilter

_SESSIONS = 4096  # users of boxes that live on
_OPEN = ("seccomp", "none")  # walls that keep no files apart
_EXTRA = 4  # processes that count against a user's limit in a user namespace: this one, and a box of the other side


class Walls(NamedTuple):
    """The walls around the boxes of this machine."""

    level: str
    calls: CallFilter | None
    user: int | None = None  # user id for boxes of root
    pids: int | None = None  # namespace of the warm process
    files: int | None = None  # rules of Landlock
    read_all: bool = False  # Python lies where not everybody may read


def main(argv: list[str]) -> None:
    """Fork boxes until the caller hangs up."""
    control, settings = socket.socket(fileno=int(argv[0])), json.loads(argv[1])
    for name in settings["preload"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    visible = [path for path in {*sys.path, sys.prefix, sys.base_prefix} if path and path not in settings["hidden"]]
    try:
        walls = _walls(settings, visible)
        sys.path[:] = [path for path in sys.path if walls.level in _OPEN or path not in settings["hidden"]]
        zygote = _Zygote(control, settings, walls)
        zygote.check()
    except OSError as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return
    zygote.run()


def _walls(settings: dict[str, Any], visible: list[str]) -> Walls:
    """Return the best walls of this machine, or those that are asked for."""
    refusals: list[str] = []
    if settings["backend"] != "landlock":
        try:
            root = isolation.enter_namespaces()
        except OSError as error:
            refusals.append(str(error))
        else:
            return _namespaces(settings, visible, root)
    isolation.adopt_orphans()
    if settings["backend"] != "namespaces":
        try:
            return _landlock(settings, visible)
        except OSError as error:
            refusals.append(str(error))
    if not settings["allow_unisolated"]:
        raise isolation.IsolationError("; ".join(refusals))
    try:
        return Walls("seccomp", CallFilter())
    except OSError:
        return Walls("none", None)


def _namespaces(settings: dict[str, Any], visible: list[str], root: bool) -> Walls:
    isolation.become_first()
    pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
    settings["scratch"] = isolation.make_root(settings["scratch"], visible)
    return Walls("namespaces, seccomp", CallFilter(), settings["user"] if root else None, pids)


def _landlock(settings: dict[str, Any], visible: list[str]) -> Walls:
    user = settings["user"] if os.geteuid() == 0 else None
    files = landlock.rules(visible, own_user=user is not None)
    parents = {str(parent) for path in visible if os.path.exists(path) for parent in Path(path).resolve().parents}
    closed = [path for path in parents if not os.stat(path).st_mode & stat.S_IXOTH]
    return Walls("landlock, seccomp", CallFilter(), user, files=files, read_all=bool(closed))


class _Zygote:
    def __init__(self, control: socket.socket, settings: dict[str, Any], walls: Walls):
        self._control, self._settings, self._walls = control, settings, walls
        self._boxes: dict[int, tuple[int, int]] = {}  # pidfd -> number of the box, pid
        self._others = 0, -1.0  # processes of this user elsewhere, and when they were counted

    def check(self) -> None:
        """Try the walls in a process of their own (IsolationError: not put up, or Python's files are not readable)."""
        if self._walls.files is None:
            return
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                self._confine({"mode": "script", "box": 0})
                os.stat(json.__file__)
                open(json.__file__).close()
            except BaseException as error:
                os.write(theirs, str(error).encode())
            finally:
                os._exit(0)
        os.close(theirs)
        with open(ours) as said:
            refusal = said.read()
        os.waitpid(pid, 0)
        if refusal:
            raise isolation.IsolationError(refusal)

    def run(self) -> None:
        gc.collect()
        gc.freeze()  # collections in boxes then leave the pages that they share with this process alone
        self._say({"ready": self._walls.level})
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._control.fileno():
                    data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 4)
                    if not data:
                        self._kill(None)
                        return
                    message = json.loads(data)
                    if "kill" in message:
                        self._kill(message["kill"])
                    else:
                        poll.register(self._start(message, descriptors), select.POLLIN)
                else:
                    poll.unregister(descriptor)
                    self._reap(descriptor)

    def _say(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> int:
        if self._walls.pids is not None:
            os.setns(self._walls.pids, os.CLONE_NEWPID)
            os.unshare(os.CLONE_NEWPID)
        self._count_others()
        if (pid := os.fork()) == 0:
            self._become(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._boxes[pidfd] = message["box"], pid
        return pidfd

    def _become(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Be a box: no way out, not even by an exception."""
        status = 1
        try:
            null = os.open("/dev/null", os.O_RDWR)
            kept = sorted([*descriptors, *filter(None, [self._walls.files])])
            for descriptor in range(3):
                os.dup2(null, descriptor)
            low = 3
            for descriptor in kept:
                os.closerange(low, descriptor)
                low = descriptor + 1
            os.closerange(low, 1 << 12)
            os.setsid()
            self._confine(message)
            status = box.run(message["mode"], descriptors)
        except BaseException:  # programs are told of their end elsewhere
            status = 1
        finally:
            os._exit(status & 0xFF)

    def _confine(self, message: dict[str, Any]) -> None:
        settings, walls, tasks = self._settings, self._walls, self._settings["tasks"] + _EXTRA
        user = walls.user
        if message["mode"] == "session":  # one of many: apart by their users, or else by counting all of them
            user = None if user is None else user + 1 + message["box"] % _SESSIONS
            tasks += 0 if user is not None else 3 * len(self._boxes)
        if walls.pids is not None:
            isolation.private_tmp(settings["scratch"], settings["disk_mb"])
            isolation.drop_privileges(user)
        elif walls.files is not None:
            os.chdir("/")
            isolation.drop_privileges(user, read_all=walls.read_all)
            landlock.restrict(walls.files)
            os.close(walls.files)
        else:
            os.chdir(settings["scratch"])
        if walls.pids is None:
            isolation.die_with_parent()
            tasks += 0 if user is not None else self._others[0]
        isolation.limit(
            memory_mb=settings["memory_mb"], cpu_s=settings["cpu_s"], file_mb=settings["disk_mb"], processes=tasks
        )
        if walls.calls is not None:
            walls.calls.load()

    def _count_others(self) -> None:
        """Count what else runs under this user, at most once a second, where the limit of processes counts it too."""
        if self._walls.pids is None and self._walls.user is None and time.monotonic() > self._others[1] + 1.0:
            self._others = isolation.tasks_of(os.geteuid()), time.monotonic()

    def _kill(self, number: int | None) -> None:
        for one, pid in self._boxes.values():
            if number in (None, one):
                self._kill_all(pid)

    def _kill_all(self, pid: int) -> None:
        """Kill a box with all that it has started: its namespace of pids, or its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._walls.pids is None:
                os.killpg(pid, signal.SIGKILL)

    def _reap(self, pidfd: int) -> None:
        number, pid = self._boxes.pop(pidfd)
        os.close(pidfd)
        if self._walls.pids is None:
            self._kill_all(pid)  # remains of the box, before its number can be reused
        _, status, usage = os.wait4(pid, 0)
        with contextlib.suppress(ChildProcessError):
            while self._walls.pids is None:
                os.waitpid(-pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._say({"ended": number, "code": code, "cpu_s": usage.ru_utime + usage.ru_stime})


if __name__ == "__main__":
    main(sys.argv[1:])
