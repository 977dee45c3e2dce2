"""Forks of a warm interpreter: a server forks a worker for each request, and ends it with the process that asked."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from mesh.imports import many_imports

NAME = "axl-warm"  # name of its process; forks are named by Ray
_OF_ROLES = ("rl.runtime.ray", "ray", "rl.runtime.role_process")  # imported with a job's variables
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_SET_NAME = 15  # PR_SET_NAME
_CREDENTIALS = struct.Struct("iII")  # pid, user, group
_RAYLET = "RAY_RAYLET_PID"
_LARGEST = 1 << 18  # bytes of a request, most of which are variables


def end_with(parent: int, name: str = "") -> None:
    """Let this process, a fork, end with the one that forked it, and have a name of its own if one is given."""
    library = ctypes.CDLL(None)
    library.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if name:
        library.prctl(_SET_NAME, name.encode())
    if os.getppid() != parent:
        os._exit(0)


def _import_for(variables: Mapping[str, str]) -> None:
    """Import what the workers of a job need, in a fork which is theirs alone.

    Ray takes it for their raylet: a worker ends with the process that asked for it, which ends with its raylet.
    """
    os.environ |= {**variables, _RAYLET: str(os.getpid())}
    with many_imports():
        for name in _OF_ROLES:
            importlib.import_module(name)
    _freeze()


def _freeze() -> None:
    """Be ready to be forked, or end: workers start by themselves then."""
    end_pools()
    if count_threads() > 1:
        os._exit(1)
    gc.freeze()


def end_pools() -> None:
    """End pools of threads that know of forks: OpenBLAS ends its own before one, and starts it again when needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warnings about forks of a process with threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def count_threads() -> int:
    """Return the threads of this process."""
    return len(os.listdir("/proc/self/task"))


def set_by_imports() -> dict[str, tuple[str | None, str]]:
    """Return variables that imports have set, as jax does for libtpu: values when the process began, and now."""
    with open("/proc/self/environ", errors="surrogateescape") as file:
        first = dict(one.split("=", 1) for one in file.read().split("\0") if "=" in one)
    return {name: (first.get(name), value) for name, value in os.environ.items() if first.get(name) != value}


class ForkServer:
    """Forks workers, or lets an interpreter that has imported Ray for their job do so."""

    def __init__(self, listener: socket.socket, changed: Mapping[str, tuple[str | None, str]], *, of_job: bool = False):
        """`of_job`: requests come from the warm interpreter, through `listener`."""
        self._listener, self._changed, self._of_job = listener, changed, of_job
        self._interpreters: dict[int, int] = {}  # descriptor of the process of each -> pid
        self._retired = False  # no more requests will come
        self._jobs: dict[str, socket.socket] = {}  # variables of Ray -> the interpreter which has imported it with them
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._connections: dict[int, socket.socket] = {}  # descriptor -> connection
        self._workers: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a process -> pid, asking connection

    def run(self) -> None:
        """Fork workers until this process is killed; returns in each of them."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._listener.fileno() and not self._of_job:
                    self._accept()
                elif descriptor == self._listener.fileno():
                    if self._answer_passed_on():
                        return
                elif descriptor in self._workers:
                    self._reap(descriptor)
                elif descriptor in self._interpreters:
                    self._poll.unregister(descriptor)
                    os.close(descriptor)
                    os.waitpid(self._interpreters.pop(descriptor), 0)
                elif descriptor in self._connections and self._answer(self._connections[descriptor]):
                    return

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            return connection.close()
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _answer(self, connection: socket.socket) -> bool:
        """Fork a worker; returns True in it. A worker ends with the process that asked for it."""
        data, output = b"", list[int]()
        with contextlib.suppress(ConnectionError):
            data, output, _, _ = socket.recv_fds(connection, _LARGEST, 3)
        if not data:
            self._hang_up(connection)
            return False
        request = json.loads(data)
        if "packages" in request:
            self._learn(request["packages"])
            return False
        environment: dict[str, str] = request["environment"]
        if "RAY_JOB_ID" in environment:
            variables = {k: value for k, value in environment.items() if k.startswith("RAY_") and k != _RAYLET}
            if (channel := self._job(variables, output)) is None:
                return True
            with contextlib.suppress(OSError):  # interpreter has died: this one answers
                socket.send_fds(channel, [data], [connection.fileno(), *output])
                return self._forget(connection, output)
        return self._start(request, output, connection)

    def _learn(self, packages: list[str]) -> None:
        with many_imports():
            for name in packages:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        _freeze()

    def _job(self, variables: dict[str, str], output: list[int]) -> socket.socket | None:
        """Return the channel to the interpreter of a job, made if there is none; None in its workers."""
        key = json.dumps(variables, sort_keys=True)
        if key not in self._jobs:
            while len(self._jobs) > 1:
                self._jobs.pop(next(iter(self._jobs))).close()  # interpreter, which ends with its last worker
            parent, (ours, theirs) = os.getpid(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if (pid := os.fork()) == 0:
                ours.close()
                self._close()
                for descriptor in output:
                    os.close(descriptor)
                end_with(parent, NAME)
                _import_for(variables)
                ForkServer(theirs, set_by_imports(), of_job=True).run()
                return None
            theirs.close()
            self._jobs[key] = ours
            self._interpreters[process := os.pidfd_open(pid)] = pid
            self._poll.register(process, select.POLLIN)
        return self._jobs[key]

    def _forget(self, connection: socket.socket, output: list[int]) -> bool:
        """Leave a connection to the interpreter that it was passed on to."""
        self._poll.unregister(connection)
        del self._connections[connection.fileno()]
        connection.close()
        for descriptor in output:
            os.close(descriptor)
        return False

    def _answer_passed_on(self) -> bool:
        """Fork a worker for a request that was passed on; returns True in it."""
        data, given, _, _ = socket.recv_fds(self._listener, _LARGEST, 4)
        if not data:
            self._retired = True
            self._poll.unregister(self._listener)
            return self._end_if_idle()
        connection = socket.socket(fileno=given[0])
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)
        return self._start(json.loads(data), given[1:], connection)

    def _start(self, request: dict[str, Any], output: list[int], connection: socket.socket) -> bool:
        if (pid := os.fork()) == 0:
            self._close()
            _become(request, output, self._changed)
            return True
        for descriptor in output:
            os.close(descriptor)
        process = os.pidfd_open(pid)
        self._workers[process] = pid, connection
        self._poll.register(process, select.POLLIN)
        with contextlib.suppress(OSError):  # client has died: it hangs up, and its worker is ended
            connection.send(str(pid).encode())
        return False

    def _end_if_idle(self) -> bool:
        if self._retired and not self._workers:
            os._exit(0)
        return False

    def _hang_up(self, connection: socket.socket) -> None:
        self._poll.unregister(connection)
        del self._connections[connection.fileno()]
        connection.close()
        for pid in [pid for pid, asked in self._workers.values() if asked is connection]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _reap(self, process: int) -> None:
        self._poll.unregister(process)
        pid, connection = self._workers.pop(process)
        os.close(process)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):  # client may have hung up
            connection.send(str(code if code >= 0 else 128 - code).encode())
        self._end_if_idle()

    def _close(self) -> None:
        for one in (self._listener, *self._connections.values(), *self._jobs.values()):
            one.close()
        for process in (*self._workers, *self._interpreters):
            os.close(process)


def _become(request: dict[str, Any], output: list[int], changed: Mapping[str, tuple[str | None, str]]) -> None:
    """Take variables, folder, signals and output of the process that asked."""
    for target, descriptor in enumerate(output):
        os.dup2(descriptor, target)
        os.close(descriptor)
    given: dict[str, str] = request["environment"]
    os.environ.clear()
    os.environ |= given | {name: value for name, (first, value) in changed.items() if given.get(name) == first}
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["deaf"] else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    try:
        os.setpgid(0, os.getpgid(request["pid"]))
    except OSError:  # process has another session, same as at the head; a raylet ends a worker's whole group
        os.setpgid(0, 0)
    with contextlib.suppress(OSError), open(f"/proc/{request['pid']}/oom_score_adj") as file:
        score = file.read()
        with open("/proc/self/oom_score_adj", "w") as own:
            own.write(score)
    sys.argv = request["command"]
