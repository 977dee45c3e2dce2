"""The process that a raylet starts for a worker: it asks the machine's warm interpreter for one, or becomes one.

It stands for the worker until that ends, because a raylet waits for children of its own. It imports nothing but the
standard library, which takes a fortieth of what a worker imports.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import socket
import sys

VARIABLE = "AXL_WARM_INTERPRETER"  # path of its socket
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG; its parent is a raylet
_SCRIPT = ("_private", "workers", "default_worker.py")


def main() -> int:
    """Return the exit status of the worker; without a warm interpreter this process becomes it."""
    sys.path.pop(0)  # removes this folder
    with contextlib.suppress(AttributeError, OSError):  # Linux
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    found = importlib.util.find_spec("ray")
    assert found is not None and found.submodule_search_locations is not None
    command = [os.path.join(found.submodule_search_locations[0], *_SCRIPT), *sys.argv[1:]]
    if path := os.environ.get(VARIABLE):
        status = forked(path, command)
        if status is not None:
            return status
    os.execv(sys.executable, [sys.executable, *command])


def forked(path: str, command: list[str]) -> int | None:
    """Run a script with its arguments in a fork of the warm interpreter; None: there is none, and nothing was started.

    The fork has this process's variables, folder, signals and output, and gets its SIGTERM.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        request = {
            "command": command,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "pid": os.getpid(),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "deaf": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        }
        try:
            connection.connect(path)
            socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
            answer = connection.recv(64)
        except OSError:
            return None
        if not answer:
            return None
        pid = int(answer)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
        ended = b""  # warm interpreter died: its children live on
        with contextlib.suppress(OSError):
            ended = connection.recv(64)
        return int(ended) if ended else 1


if __name__ == "__main__":
    sys.exit(main())
