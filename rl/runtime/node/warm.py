"""A warm interpreter, which has imported what every role needs: workers are forked from it, in milliseconds.

Each process of a role imports jax, flax, Ray and ours: 1.8 CPU seconds, of which a fork has 0.2 left: Ray itself, which
keeps for good what its variables are when it is imported, among them the job of the worker. On a machine that comes in
the place of a lost one, imports run while Ray starts, not after it; roles that share a machine import once. What a fork
asks for is in `worker.py`; where there is no warm interpreter, or it has died, a worker is an interpreter of its own.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from axlearn_like.run.scratch import make_scratch
from mesh.imports import many_imports
from rl.runtime.node.worker import VARIABLE

__all__ = ["NAME", "VARIABLE", "fork_server", "run_worker", "serve_node"]

NAME = "axl-warm"  # name of its process; forks are named by Ray

MODULES = ("rl.experiment", "rl.fleet.processes", "rl.parameter_server.rpc", "rl.parameter_server.server")
_OF_RAY = ("asyncio", "jsonschema", "msgpack", "pydantic", "requests")  # half of what it imports; some may be missing
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_SET_NAME = 15  # PR_SET_NAME
_CREDENTIALS = struct.Struct("iII")  # pid, user, group
_LARGEST = 1 << 18  # bytes of a request, most of which are variables


def fork_server(path: str, modules: Sequence[str] = MODULES) -> int:
    """Fork this process, which has one thread, into a warm interpreter that listens at `path` and ends with it.

    The folder of `path` must be this user's alone. Other users' processes are refused as well.

    Returns:
        The pid of the warm interpreter; as from `os.fork`, 0 in a worker, whose `sys.argv` is its script with
        arguments: it has to call `run_worker`.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(path)
    server.listen(64)  # early clients wait, no longer than their own import would take
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) != 0:
        server.close()
        return pid
    for option, value in ((_DIE_WITH_PARENT, signal.SIGKILL), (_SET_NAME, NAME.encode())):
        ctypes.CDLL(None).prctl(option, value)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with many_imports():
        for name in modules:
            importlib.import_module(name)
        for name in _OF_RAY:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    _end_pools()
    if why := _unfit():
        print(f"axl: workers start by themselves: {why}", file=sys.stderr)
        os._exit(1)
    gc.freeze()
    _Server(server, _set_by_imports()).run()
    return 0


@contextmanager
def serve_node() -> Generator[None]:
    """Let the workers of this machine be forked from this process as it is now, while it is in this context.

    A launched run has the name of a socket in the environment. Where Ray is started by this process, it gets one here;
    processes of another Ray do not know it. A process with threads, such as a notebook's, must not be forked: its
    workers start by themselves. Does not return in a worker.
    """
    path, folder, pid = os.environ.get(VARIABLE), None, None
    fit = may_be_forked()
    if fit and path is None and "RAY_ADDRESS" not in os.environ:
        folder = make_scratch("warm", "/tmp" if os.path.isdir("/tmp") else None)
        path = os.environ[VARIABLE] = f"{folder}/socket"  # /tmp: sockets need short paths
    if fit and path is not None and not os.path.exists(path) and (pid := fork_server(path)) == 0:
        run_worker()
    try:
        yield
    finally:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if folder is not None:
            del os.environ[VARIABLE]
            shutil.rmtree(folder, ignore_errors=True)


def run_worker() -> NoReturn:
    """Run the script of a worker in its fork, to its end."""
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(0)


def _end_pools() -> None:
    """End pools of threads that know of forks: OpenBLAS ends its own before one, and starts it again when needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warnings about forks of a process with threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def may_be_forked() -> bool:
    """Return True if this process has no threads but those of pools, which are ended here."""
    from mesh.programs.jax_internals import devices_are_open

    if sys.platform != "linux" or threading.active_count() > 1 or devices_are_open():
        return False
    _end_pools()
    return _threads() == 1


def _unfit() -> str:
    """Say why this process must not be forked; empty if it may."""
    if (threads := _threads()) > 1:
        return f"the imports have started {threads - 1} threads, of which a fork would have none"
    return "ray was imported" if "ray" in sys.modules else ""


def _set_by_imports() -> dict[str, tuple[str | None, str]]:
    """Return variables that imports have set, as jax does for libtpu: values when the process began, and now."""
    with open("/proc/self/environ", errors="surrogateescape") as file:
        first = dict(one.split("=", 1) for one in file.read().split("\0") if "=" in one)
    return {name: (first.get(name), value) for name, value in os.environ.items() if first.get(name) != value}


class _Server:
    def __init__(self, listener: socket.socket, changed: Mapping[str, tuple[str | None, str]]):
        self._listener, self._changed = listener, changed
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._connections: dict[int, socket.socket] = {}  # descriptor -> connection
        self._workers: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a process -> pid, asking connection

    def run(self) -> None:
        """Fork workers until this process is killed; returns in each of them."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor in self._workers:
                    self._reap(descriptor)
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

    def _close(self) -> None:
        for one in (self._listener, *self._connections.values()):
            one.close()
        for process in self._workers:
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
