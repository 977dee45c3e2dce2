"""Main program of a verification process.

`python -m rl.verification.worker SOCKET PARENT MEMORY_MB` (a descriptor, a pid).

It receives JSON on the inherited socket: first the text of the scorer's config, then chunks of (problem id, answers,
details). It tells when it begins a chunk, and then the result of each answer, in order. The process ends with its
parent.
"""

import contextlib
import dataclasses
import json
import os
import resource
import select
import signal
import socket
import sys
import threading

from axlearn_like.config import from_text
from mesh.imports import many_imports
from rl.verification.sandbox import isolation
from rl.verification.sandbox.calls import CallFilter
from rl.verification.scorers import Scorer, score_answers
from rl.verification.wire import pack

_TMP_MB = 64  # limit of a confined process


def die_with_parent(parent: int, connection: socket.socket) -> None:
    """Let the kernel kill this process when the pool's thread ends; elsewhere than on Linux a thread watches."""
    if not isolation.die_with_parent():

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
    apart = _confine(asked["scratch"]) if asked["scratch"] else ""
    connection.sendall(pack({"ready": True, "isolation": apart}))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # stderr held why a start failed; scorers print to nothing
    for chunk in chunks:
        connection.sendall(pack({"begun": True}))
        for job in json.loads(chunk):
            scores = score_answers(scorer, *job, failures=BaseException)  # SystemExit too: a model's code may run
            connection.sendall(b"".join(pack(dataclasses.asdict(score)) for score in scores))


def _confine(scratch: str) -> str:
    """Go on in a child without network, privileges and files of others, where the machine allows; say what it is.

    The child is the first process of a namespace, so that whatever an answer may start ends with it.
    """
    visible = [path or os.getcwd() for path in (*sys.path, sys.prefix, sys.base_prefix)]
    try:
        isolation.enter_namespaces()
    except OSError as error:
        return f"none: {error}"
    isolation.become_first()
    try:
        calls = CallFilter()
        isolation.private_tmp(isolation.make_root(scratch, visible), _TMP_MB)
        isolation.drop_privileges(None)
        calls.load()
    except OSError as error:  # an old kernel, or a container that forbids to mount: network and pids are apart
        return f"none of files: {error}"
    return "namespaces, seccomp"


if __name__ == "__main__":
    main(sys.argv[1:])
