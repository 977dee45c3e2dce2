"""Scorers that do what a verifier must survive; the pool's processes import them from here."""

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from rl.verification.scorers import Scorer
from rl.verification.wire import MAX_REPLY, pack


def score(problem_id: int, answer: str) -> float:
    """The problem id over 1000 for "fine"; otherwise it does what `answer` says."""
    action, _, argument = answer.partition(" ")
    if action == "hang":
        time.sleep(1000)
    elif action == "hang-in-c":  # holds the interpreter's lock: no other thread of the process runs
        pow(int("9" * 4000), 10**8)
    elif action == "exit":
        os._exit(int(argument))
    elif action == "sys-exit":
        sys.exit(1)
    elif action == "segfault":
        ctypes.string_at(0)
    elif action == "raise":
        raise ValueError(f"cannot read {argument!r}")
    elif action == "nan":
        return float("nan")
    elif action == "text":
        return "much"  # pyright: ignore[reportReturnType]
    elif action == "memory":
        return float(len(bytearray(1 << 40)))
    elif action == "print":
        print("x" * 1_000_000, file=sys.stderr)
        print("x" * 1_000_000)
    elif action == "killed":  # as if by someone else, the first `deaths` times
        path, deaths = argument.rsplit(" ", 1)
        if len(Path(path).read_text()) < int(deaths):
            with open(path, "a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
    elif action == "environment":
        return float("jax" in sys.modules) + float(os.environ["JAX_PLATFORMS"] != "cpu")
    elif action == "variable":
        return float(len(os.environ[argument]))
    elif action.startswith("forge-"):
        forge(action, argument)
    elif action == "forget":  # a child of its own
        Path(argument).write_text(str(os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)))
    return problem_id / 1000


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def forge(action: str, argument: str) -> None:
    """Write what is no result to the socket, as a hijacked process could."""
    (connection,) = reachable(socket.socket)
    right: Any = {"status": "ok", "reward": 1.0, "terms": [], "seconds": 0.0}
    messages = {
        "forge-pickle": pickle.dumps(Bomb(argument)) + b"\n",
        "forge-message": b"[1]\n",
        "forge-huge": b" " * (MAX_REPLY + 1),
        "forge-status": pack({"begun": True}),
        "forge-reward": pack({**right, "reward": "1"}),
        "forge-number": pack({**right, "reward": 10**4000}),
        "forge-terms": pack({**right, "terms": [["bonus", [1]]]}),
        "forge-seconds": pack({**right, "seconds": "long"}),
        "forge-endless": b"",
    }
    connection.sendall(messages[action])
    while action == "forge-endless":
        connection.sendall(b" " * 1000)
    time.sleep(1000)


def reachable(kind: type) -> list[Any]:
    """Return the instances of a class that the garbage collector knows, or the first local variables that are some."""
    frame, found = sys._getframe(), []
    while frame is not None and not found:
        found = [value for value in frame.f_locals.values() if type(value) is kind]
        frame = frame.f_back
    return found[:1]


def digits(problem_id: int, answer: str) -> float:
    """The share of digits in the answer."""
    return sum(c.isdigit() for c in answer) / max(1, len(answer))


class Confined(Scorer):
    """A scorer that does what answers say, in a process that is kept apart."""

    class Config(Scorer.Config):
        def confined(self) -> bool:
            return True

    def __init__(self, cfg: Config):
        pass

    def score(self, problem_id: int, answer: str) -> float:
        action, _, argument = answer.partition(" ")
        if action == "read":
            return float(len(Path(argument).read_text()))
        if action == "connect":
            socket.create_connection(("127.0.0.1", int(argument)), timeout=1)
        if action == "write":
            Path(argument).write_text("x")
        if action == "signal":
            os.kill(int(argument), signal.SIGTERM)
        if action == "daemon" and os.fork() == 0:
            with contextlib.suppress(PermissionError):  # where calls are filtered
                os.setsid()
            time.sleep(1000)
        return score(problem_id, answer) if action in ("hang", "exit", "segfault", "killed") else 1.0


class CannotStart(Scorer):
    """A scorer whose process always ends before it is ready."""

    class Config(Scorer.Config):
        pass

    def __init__(self, cfg: Config):
        raise OSError("the answer key is missing")

    def score(self, problem_id: int, answer: str) -> float:
        return 0.0


class NeverReady(Scorer):
    """A scorer that hangs while it is built."""

    class Config(Scorer.Config):
        pass

    def __init__(self, cfg: Config):
        time.sleep(1000)

    def score(self, problem_id: int, answer: str) -> float:
        return 0.0
