"""Scorers that do what a verifier must survive; the pool's processes import them from here."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from rl.verification.scorers import Scorer


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
    elif action == "forget":  # a child of its own
        Path(argument).write_text(str(os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)))
    return problem_id / 1000


def digits(problem_id: int, answer: str) -> float:
    """The share of digits in the answer."""
    return sum(c.isdigit() for c in answer) / max(1, len(answer))


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
