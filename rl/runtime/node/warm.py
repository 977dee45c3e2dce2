"""A warm interpreter, which has imported what every role needs: workers are forked from it, in milliseconds.

Each process of a role imports jax, flax, Ray and ours: 1.8 CPU seconds. Ray keeps for good what its variables are when
it is imported, among them the job of the worker. So the first worker of a job and a raylet lets a fork import Ray, from
which all of them are forked. On a machine that comes in the place of a lost one, imports run while Ray starts, not
after it; roles that share a machine import once. What a fork asks for is in `worker.py`; where there is no warm
interpreter, or it has died, a worker is an interpreter of its own.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from axlearn_like.run.scratch import make_scratch
from mesh.imports import many_imports
from rl.runtime.node.forks import NAME, ForkServer, count_threads, end_pools, end_with, set_by_imports
from rl.runtime.node.worker import VARIABLE

__all__ = ["NAME", "VARIABLE", "fork_server", "run_worker", "serve_node", "teach"]


MODULES = ("rl.experiment", "rl.fleet.processes", "rl.parameter_server.rpc", "rl.parameter_server.server")
_OF_RAY = ("asyncio", "jsonschema", "msgpack", "pydantic", "requests")  # half of what it imports; some may be missing


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
    end_with(parent, NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with many_imports():
        for name in modules:
            importlib.import_module(name)
        for name in _OF_RAY:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    end_pools()
    if why := _unfit():
        print(f"axl: workers start by themselves: {why}", file=sys.stderr)
        os._exit(1)
    gc.freeze()
    ForkServer(server, set_by_imports()).run()
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


def teach(packages: Sequence[str]) -> None:
    """Let this machine's warm interpreter, if there is one, import further packages, which the roles will need."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, contextlib.suppress(OSError):
        connection.connect(os.environ.get(VARIABLE, ""))
        connection.send(json.dumps({"packages": packages}).encode())


def run_worker() -> NoReturn:
    """Run the script of a worker in its fork, to its end."""
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(0)


def may_be_forked() -> bool:
    """Return True if this process has no threads but those of pools, which are ended here."""
    from mesh.programs.jax_internals import devices_are_open

    if sys.platform != "linux" or threading.active_count() > 1 or devices_are_open():
        return False
    end_pools()
    return count_threads() == 1


def _unfit() -> str:
    """Say why this process must not be forked; empty if it may."""
    if (threads := count_threads()) > 1:
        return f"the imports have started {threads - 1} threads, of which a fork would have none"
    return "ray was imported" if "ray" in sys.modules else ""
