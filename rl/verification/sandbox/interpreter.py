"""The program of a session's box: a Python interpreter whose names live on from input to input.

Three processes: the *keeper*, the first of the box, talks to the caller; the *holder* has the names; a *runner* is
forked from it for each input, and forks the next holder when the input is done. So an input that is killed, or dies,
leaves the names as they were, and nothing runs between two inputs: threads do not live on in a fork, and the keeper
kills all processes but the holder. Code that nobody trusts runs in runners; what it may do to the link between holder
and keeper loses its own session and no more.

Without isolation the keeper cannot tell its processes from others, so there an input that is late ends the session.
"""

import builtins
import contextlib
import os
import random
import select
import signal
import socket
import sys
from typing import Any

from rl.verification.sandbox.statements import InputProgram
from rl.verification.sandbox.values import receive, send

_ROUNDS = 50  # rounds of killing until nothing is left
_JOBS = {"code", "begin", "part", "whole", "commit", "discard"}
_AHEAD = 4096  # ids beyond the last one that was seen, where no process can be started to see the next


def run(channel: socket.socket) -> int:
    """Keep an interpreter until the caller hangs up, or the interpreter is lost."""
    link, theirs = socket.socketpair()
    holder = os.fork()
    if holder == 0:
        channel.close()
        link.close()
        _hold(theirs)
    theirs.close()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans leave no zombie
    keeper = _Keeper(channel, link, holder)
    with contextlib.suppress(ValueError, OSError):
        while keeper.step():
            pass
    return 0


class _Keeper:
    def __init__(self, channel: socket.socket, link: socket.socket, holder: int):
        self._channel, self._link, self._holder = channel, link, holder
        self._last = holder  # highest id seen
        self._number = 0  # inputs so far

    def step(self) -> bool:
        """Have one input run, or a part of one; returns False if there are no more."""
        if (job := receive(self._channel)) is None:
            return False
        if not isinstance(job, dict) or not job.keys() & _JOBS:
            return True  # the end of an input that has ended by itself
        self._number += bool(job.keys() & {"code", "begin"})
        send(self._link, {**job, "number": self._number})
        while True:
            ready, _, _ = select.select([self._channel, self._link], [], [])
            if self._link in ready:
                if not isinstance(reply := receive(self._link), dict):
                    return False
                if reply.get("number") == self._number:
                    break
                continue
            if receive(self._channel) is None or not self._kill():
                return False
        self._holder = reply["holder"] if isinstance(reply.get("holder"), int) else self._holder
        if "ran" not in reply:  # the input is over
            self._kill()
        send(self._channel, {name: reply[name] for name in ("output", "ended", "ran") if name in reply})
        return True

    def _kill(self) -> bool:
        """Kill all processes of the box but this one and the holder; returns False if they cannot be told apart."""
        if os.getpid() != 1:
            return False
        for _ in range(_ROUNDS):
            killed = 0
            for pid in range(2, self._highest() + 1):
                if pid != self._holder:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed += 1
            if not killed:
                break
        return True

    def _highest(self) -> int:
        """Return an id that no process exceeds."""
        try:
            if (pid := os.fork()) == 0:
                os._exit(0)
        except OSError:
            return self._last + _AHEAD
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        self._last = max(self._last, pid)
        return self._last


def _hold(link: socket.socket) -> None:
    """Hold the names: never returns."""
    random.seed(0)
    sys.stdin = open(os.devnull)
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    while (job := receive(link)) is not None:
        ours, theirs = os.pipe()
        drawn = random.getstate()  # a fork draws a new one
        if (runner := os.fork()) == 0:
            os.close(ours)
            random.setstate(drawn)
            own = os.getpid()
            program = InputProgram(space)
            reply = _in_parts(program, link, job["number"]) if "begin" in job else _at_once(program, job)
            if os.getpid() != own or reply is None:
                os._exit(0)  # a fork that the input has made, and which has come this far; or nothing is to be kept
            drawn = random.getstate()
            if (holder := os.fork()) == 0:
                os.close(theirs)
                random.setstate(drawn)
                continue
            with contextlib.suppress(ValueError, OSError):
                send(link, {**reply, "holder": holder})
                os.write(theirs, b"1")
            os._exit(0)
        os.close(theirs)
        os.waitpid(runner, 0)
        os.set_blocking(ours, False)
        with contextlib.suppress(BlockingIOError):
            if os.read(ours, 1):
                os._exit(0)  # another holds what there is now
        os.close(ours)
        send(link, {"ended": True, "number": job["number"]})
    os._exit(0)


def _at_once(program: InputProgram, job: dict[str, Any]) -> dict[str, Any]:
    """Run an input; the stack is as deep as that of one in parts."""
    return {"output": program.output(job["code"])[: job["limit"]], "number": job["number"]}


def _in_parts(program: InputProgram, link: socket.socket, number: int) -> dict[str, Any] | None:
    """Run an input as it comes; returns the last reply, or None if what it has changed is to be dropped."""
    own = os.getpid()
    answer: dict[str, Any] = {"ran": True}
    while True:
        send(link, {**answer, "number": number})
        job = receive(link)
        if os.getpid() != own or job is None or "discard" in job:
            return None
        if "commit" in job:
            return {"output": "", "number": number}
        if "part" in job:
            program.feed(job["part"])
            answer = {"ran": True}
        else:
            output = program.finish(job["whole"])
            answer = {"ran": False} if output is None else {"ran": True, "output": output[: job["limit"]]}
        if os.getpid() != own:
            return None
