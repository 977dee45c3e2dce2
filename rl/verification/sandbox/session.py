"""Sessions: interpreters in boxes of their own, whose names live on from input to input.

A session's box lives until the session is closed, or is lost. Each input has the limits and the deadline of a program;
what it leaves running is killed with its end (see `interpreter`). All sessions of a sandbox are forked from one warm
process, and as many inputs run at a time as the sandbox has processes.
"""

import threading
import time
from typing import Any, override

from axlearn_like.run.closing import Closing
from rl.verification.sandbox.values import receive, send
from rl.verification.sandbox.warm_process import REAP_S, Box, Limits, Outcome, SandboxError, SandboxKilled, WarmProcess


class SessionHost:
    """The warm process of a sandbox's sessions; thread-safe. It is started when it is needed, also after its death."""

    def __init__(self, limits: Limits[Any], at_once: int):
        self.limits = limits
        self.turns = threading.BoundedSemaphore(at_once)
        self._lock = threading.Lock()
        self._process: WarmProcess | None = None
        self._closed = False

    def open(self) -> tuple[WarmProcess, Box]:
        """Fork a box with an interpreter (SandboxError: there is no sandbox)."""
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            for process in (self._process, None):
                if process is None:
                    process = self._process = WarmProcess(self.limits)
                try:
                    process.drain()
                    return process, process.start("session", [])
                except SandboxError:  # process has died
                    process.end()
            raise SandboxKilled("the process that holds the boxes of sessions ends as soon as it has started")

    def kill(self, process: WarmProcess, box: Box, *, wait: bool = False) -> bool:
        """Kill a box; returns False if its process has died, which may show only with `wait`: until the box is gone."""
        with self._lock:
            alive = process is self._process or self._closed
            if alive and not self._closed:
                try:
                    process.kill(box)
                    alive = process.drain(box if wait else None) or not wait
                except SandboxError:  # box is gone, too
                    alive = False
                if not alive:
                    process.end()
                    self._process = None
            box.channel.close()
            return alive

    def close(self) -> None:
        """End the process and with it all sessions."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.end()


class InterpreterSession(Closing):
    """An interpreter; one thread's at a time. An input that was killed, or has died, leaves the names as they were."""

    def __init__(self, host: SessionHost):
        self._host = host
        self._held: tuple[WarmProcess, Box] | None = None

    @property
    def alive(self) -> bool:
        """True from the first input on, until the interpreter is found to be lost, or closed."""
        return self._held is not None

    def run(self, code: str, *, deadline_s: float | None = None) -> Outcome:
        """Run an input; `output` is what it prints, the value of a last expression, or the error that it raises.

        "timeout" and "crash" say that it was killed or has died; "lost" that the interpreter is gone, with all names,
        and the next input begins with none; "killed" that all of the sandbox's are, which no input can cause.

        Raises:
            SandboxError: there is no sandbox.
        """
        seconds = deadline_s or self._host.limits.deadline_s
        try:
            reply, late, passed = self.ask({"code": code}, seconds)
        except SandboxKilled as error:
            return Outcome("killed", error=str(error))
        if not isinstance(reply, dict) or not reply:
            ended = "lost" if self.drop() else "killed"
            return Outcome(ended, error="the interpreter was lost, and all names with it", seconds=passed)
        if "output" in reply:
            output = str(reply["output"])[: self._host.limits.output_kb << 10]
            return Outcome("done", passed=True, output=output, seconds=passed)
        if late:
            return Outcome("timeout", error=f"not done after {seconds:g} s", seconds=passed)
        return Outcome("crash", error="the input has ended the process that ran it", seconds=passed)

    def ask(self, job: dict[str, Any], seconds: float) -> tuple[Any, bool, float]:
        """Return the reply to a job, True if it came by force after so many seconds, and the seconds that passed."""
        with self._host.turns:
            if self._held is None:
                self._held = self._host.open()
            _, box = self._held
            began, late = time.monotonic(), False
            reply = _ask(box, {**job, "limit": self._host.limits.output_kb << 10}, seconds)
            if reply is None:
                reply, late = _ask(box, {"stop": True}, REAP_S), True
            return reply, late, time.monotonic() - began

    def begin(self) -> "PartialInput":
        """Begin an input in parts; no other runs before it is committed or discarded (SandboxError: no sandbox)."""
        found = PartialInput(self, self._host.limits)
        found.ask({"begin": True})
        return found

    @override
    def close(self) -> None:
        """Kill the interpreter and all that it has started."""
        self.drop(wait=False)

    def drop(self, *, wait: bool = True) -> bool:
        """Close it; returns False if all interpreters of the sandbox are found dead, without `wait` perhaps True."""
        held, self._held = self._held, None
        return held is None or self._host.kill(*held, wait=wait)


class Discarded(Exception):
    """The input has ended before it was whole: late, dead, or of other statements than were run."""


class PartialInput:
    """An input whose statements run as soon as they are known to be complete. Nothing of it lasts before `commit`."""

    def __init__(self, session: InterpreterSession, limits: Limits[Any]):
        self._session, self._limits = session, limits
        self._left = limits.deadline_s  # seconds that its parts may still take
        self._over = False

    def feed(self, code: str) -> None:
        """Run what is complete with more of the code (Discarded: it did not end by itself)."""
        self.ask({"part": code})

    def finish(self, code: str) -> Outcome:
        """Run the rest of the code; returns what `run` would (Discarded: something else ran, or it did not end)."""
        reply = self.ask({"whole": code})
        if "output" not in reply:
            self.discard()
            raise Discarded("the whole code does not begin with the statements that were run")
        output = str(reply["output"])[: self._limits.output_kb << 10]
        return Outcome("done", passed=True, output=output)

    def commit(self) -> None:
        """Keep the names as the input has left them; the session is closed if it has died by then."""
        if "output" not in self._end({"commit": True}):
            self._session.close()

    def discard(self) -> None:
        """Leave the names as they were before the input."""
        if not self._over:
            self._end({"discard": True})

    def _end(self, job: dict[str, Any]) -> dict[str, Any]:
        self._over = True
        reply, _, _ = self._session.ask(job, self._limits.deadline_s)
        if not isinstance(reply, dict) or not reply:
            self._session.close()
            return {}
        return reply

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a part of the input, which is over if it is none."""
        if self._over:
            raise Discarded("the input is over")
        reply, _, passed = self._session.ask(job, self._left)
        self._left -= passed
        if isinstance(reply, dict) and "ran" in reply:
            if self._left <= 0:
                self.discard()
                raise Discarded("the input is late")
            return reply
        self._over = True
        if not isinstance(reply, dict) or not reply:
            self._session.close()
        raise Discarded("the input did not end by itself")


def _ask(box: Box, message: Any, seconds: float) -> Any:
    """Return the reply to a message: {} if there can be none, None if there is none in time."""
    box.channel.settimeout(seconds)
    try:
        send(box.channel, message)
        reply = receive(box.channel)
    except TimeoutError:
        return None
    except (OSError, ValueError):
        return {}
    return {} if reply is None else reply
