"""Main program of a verification process.

`python -m rl.verification.worker SOCKET BOARD CAPACITY PARENT MEMORY_MB` (descriptors, a pid).

It receives pickled messages on the inherited socket: first the scorer's config, then chunks of
(problem id, answer). Results go to the shared buffer; one short message per chunk says that it is done. The
process ends with its parent.
"""

import contextlib
import ctypes
import math
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any

from rl.roles.messages import ScoreStatus
from rl.verification.scorers import Scorer
from rl.verification.shared_buffer import ResultBuffer

__all__ = ["main", "pack"]

_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1


def pack(message: Any) -> bytes:
    """Encode a message: its length, then its pickle."""
    payload = pickle.dumps(message)
    return _LENGTH.pack(len(payload)) + payload


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
    if os.getppid() != parent:  # it died before the request
        os._exit(0)


def main(argv: list[str]) -> None:
    """Score until the parent closes the connection."""
    connection_fd, results_fd, capacity, parent, memory_mb = map(int, argv)
    connection = socket.socket(fileno=connection_fd)
    die_with_parent(parent, connection)
    if memory_mb:
        with contextlib.suppress(ValueError, OSError):  # macOS refuses this limit
            resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    results = ResultBuffer(results_fd, capacity)
    stream = connection.makefile("rb")
    scorer: Scorer = _receive(stream).build()
    connection.sendall(pack("ready"))
    _silence()
    while True:
        items = _receive(stream)
        connection.sendall(pack(_score_chunk(scorer, items, results)))


def _score_chunk(scorer: Scorer, items: list[tuple[int, str]], results: ResultBuffer) -> str:
    """Score items into the shared buffer; return the text of the last exception, or ""."""
    last_error = ""
    for index, (problem_id, answer) in enumerate(items):
        results.started = start = time.monotonic()
        status: ScoreStatus = "ok"
        try:
            reward = float(scorer.score(problem_id, answer))
            if not math.isfinite(reward):
                raise ValueError(f"the scorer returned {reward}")
        except BaseException as error:  # also SystemExit: a scorer runs what a model wrote
            reward, status = 0.0, "error"
            last_error = f"problem {problem_id}: {type(error).__name__}: {error}"[:500]
        results.write(index, status, reward, time.monotonic() - start)
    return last_error


def _receive(stream: Any) -> Any:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        sys.exit(0)  # the pool hung up
    return pickle.loads(stream.read(_LENGTH.unpack(header)[0]))


def _silence() -> None:
    """Discard what scorers print. Until now stderr held why a start failed."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


if __name__ == "__main__":
    main(sys.argv[1:])
