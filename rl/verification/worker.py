"""Main program of a verification process.

`python -m rl.verification.worker SOCKET PARENT MEMORY_MB` (a descriptor, a pid).

It receives JSON on the inherited socket: first the text of the scorer's config, then chunks of (problem id, answers,
details). It tells when it begins a chunk, and then the result of each answer, in order. The process ends with its
parent.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from axlearn_like.config import from_text
from mesh.imports import many_imports
from rl.verification.rewards import check_rewards, error_text
from rl.verification.sandbox import isolation
from rl.verification.sandbox.calls import CallFilter
from rl.verification.scorers import Scorer
from rl.verification.wire import pack

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_TMP_MB = 64  # limit of a confined process


def die_with_parent(parent: int, connection: socket.socket) -> None:
    """Let the kernel kill this process when the pool's thread ends; elsewhere than on Linux a thread watches."""
    bound = False
    with contextlib.suppress(OSError, AttributeError):
        bound = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    if not bound:

        def watch() -> None:
            poll = select.poll()
            poll.register(connection, select.POLLHUP)
            poll.poll()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="die-with-parent", daemon=True).start()
    if os.getppid() != parent:  # parent died before the request
        os._exit(0)


def main(argv: list[str]) -> None:
    """Score until the parent closes the connection."""
    descriptor, parent, memory_mb = map(int, argv)
    connection = socket.socket(fileno=descriptor)
    die_with_parent(parent, connection)
    if memory_mb:
        with contextlib.suppress(ValueError, OSError):  # macOS refuses this limit
            resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    chunks = connection.makefile("rb")
    if not (first := chunks.readline()):
        sys.exit(0)
    asked = json.loads(first)
    with many_imports():
        scorer: Scorer = from_text(asked["scorer"]).build()
    apart = _confine(connection, asked["scratch"]) if asked["scratch"] else ""
    connection.sendall(pack({"ready": True, "isolation": apart}))
    _silence()
    for chunk in chunks:
        connection.sendall(pack({"begun": True}))
        for job in json.loads(chunk):
            connection.sendall(b"".join(map(pack, _results(scorer, *job))))


def _confine(connection: socket.socket, scratch: str) -> str:
    """Go on in a child without network, privileges and files of others, where the machine allows; say what it is.

    The child is the first process of a namespace, so that whatever an answer may start ends with it.
    """
    visible = [path or os.getcwd() for path in (*sys.path, sys.prefix, sys.base_prefix)]
    try:
        isolation.enter_namespaces()
    except OSError as error:
        return f"none: {error}"
    if (child := os.fork()) != 0:
        connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else 1)
    isolation.die_with_parent()
    try:
        calls = CallFilter()
        isolation.private_tmp(isolation.make_root(scratch, visible), _TMP_MB)
        isolation.drop_privileges(None)
        calls.load()
    except OSError as error:  # an old kernel, or a container that forbids to mount: network and pids are apart
        return f"none of files: {error}"
    return "namespaces, seccomp"


def _results(scorer: Scorer, problem_id: int, answers: list[str], details: list[Any]) -> Sequence[dict[str, Any]]:
    """Return the results of the answers of a job as messages."""
    start = time.monotonic()
    try:
        checked = check_rewards(scorer.score_samples(problem_id, answers, details), len(answers))
    except BaseException as error:  # includes SystemExit: a scorer may run a model's code
        checked = [error] * len(answers)
    seconds = (time.monotonic() - start) / len(answers)
    return [
        {"error": error_text(one), "seconds": seconds}
        if isinstance(one, BaseException)
        else {"reward": one[0], "terms": one[1], "seconds": seconds}
        for one in checked
    ]


def _silence() -> None:
    """Discard what scorers print. Until now stderr held why a start failed."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


if __name__ == "__main__":
    main(sys.argv[1:])
