"""A warm process from which boxes are forked, each in milliseconds and each thrown away after one program.

`python -m rl.verification.sandbox.zygote SOCKET SETTINGS`. It isolates itself once (see `isolation`), imports what
programs often need, and then forks boxes on request. A box is the first process of a pid namespace of its own, so that
everything that it has started ends with it. What a box is to run never passes through this process, whose memory later
boxes inherit: the caller hands over descriptors, and each box reads its job by itself.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from rl.verification.sandbox import box, isolation

__all__ = ["main"]

_SESSIONS = 4096  # users of boxes that live on
_EXTRA = 4  # processes that count against a user's limit in a user namespace: this one, and a box of the other side


def main(argv: list[str]) -> None:
    """Fork boxes until the caller hangs up."""
    control, settings = socket.socket(fileno=int(argv[0])), json.loads(argv[1])
    for name in settings["preload"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    visible = [path for path in {*sys.path, sys.prefix, sys.base_prefix} if path and path not in settings["hidden"]]
    try:
        root = isolation.enter_namespaces()
    except OSError as error:
        if not settings["allow_unisolated"]:
            control.send(json.dumps({"refused": str(error)}).encode())
            return
        _Zygote(control, settings, None, None, None).run("none")
        return
    if (child := os.fork()) != 0:  # the first process of the namespace of pids
        control.close()
        os.waitpid(child, 0)
        return
    isolation.die_with_parent()
    pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        settings["scratch"] = isolation.make_root(settings["scratch"], visible)
        calls = isolation.CallFilter()
    except OSError as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return
    sys.path[:] = [path for path in sys.path if path not in settings["hidden"]]
    user = settings["user"] if root else None
    _Zygote(control, settings, user, calls, pids).run("namespaces, seccomp" if calls.available else "namespaces")


class _Zygote:
    def __init__(
        self,
        control: socket.socket,
        settings: dict[str, Any],
        user: int | None,
        calls: isolation.CallFilter | None,
        pids: int | None,
    ):
        self._control, self._settings, self._calls, self._pids = control, settings, calls, pids
        self._user = user  # that boxes take
        self._boxes: dict[int, tuple[int, int]] = {}  # pidfd -> number of the box, pid

    def run(self, level: str) -> None:
        gc.collect()
        gc.freeze()  # collections in boxes then leave the pages that they share with this process alone
        self._say({"ready": level})
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
        if self._pids is not None:
            os.setns(self._pids, os.CLONE_NEWPID)
            os.unshare(os.CLONE_NEWPID)
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
            kept = sorted(descriptors)
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
        except BaseException:  # what a program is told of its own end is not said here
            status = 1
        finally:
            os._exit(status & 0xFF)

    def _confine(self, message: dict[str, Any]) -> None:
        settings, sessions = self._settings, 0
        user = self._user
        if message["mode"] == "session":  # one of many: apart by their users, or else by counting all of them
            user = None if user is None else user + 1 + message["box"] % _SESSIONS
            sessions = 0 if user is not None else 3 * len(self._boxes)
        if self._pids is not None:
            isolation.private_tmp(settings["scratch"], settings["disk_mb"])
            isolation.drop_privileges(user)
        else:
            os.chdir(settings["scratch"])
        isolation.limit(
            memory_mb=settings["memory_mb"],
            cpu_s=settings["cpu_s"],
            file_mb=settings["disk_mb"],
            processes=settings["tasks"] + _EXTRA + sessions,
        )
        if self._calls is not None:
            self._calls.load()

    def _kill(self, number: int | None) -> None:
        for one, pid in self._boxes.values():
            if number in (None, one):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if self._pids is None:
                        os.killpg(pid, signal.SIGKILL)
                    else:
                        os.kill(pid, signal.SIGKILL)

    def _reap(self, pidfd: int) -> None:
        number, pid = self._boxes.pop(pidfd)
        os.close(pidfd)
        _, status, usage = os.wait4(pid, 0)
        if self._pids is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # what the box has left behind in its session
        code = os.waitstatus_to_exitcode(status)
        self._say({"ended": number, "code": code, "cpu_s": usage.ru_utime + usage.ru_stime})


if __name__ == "__main__":
    main(sys.argv[1:])
