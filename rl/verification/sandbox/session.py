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
from rl.verification.sandbox.warm_process import REAP_S, Box, Limits, Outcome, SandboxError, WarmProcess


class SessionHost:
    """The warm process of a sandbox's sessions; thread-safe. It is started when it is needed, also after its death."""

    def __init__(self, limits: Limits[Any], at_once: int):
        self.limits = limits
        self.turns = threading.BoundedSemaphore(at_once)
        self._lock = threading.Lock()
        self._process: WarmProcess | None = None
        self._closed = False

    def open(self) -> tuple[WarmProcess, Box]:
        """Fork a box with an interpreter.

        Raises:
            SandboxError: there is no sandbox.
        """
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
            raise SandboxError("the process that holds the boxes of sessions ends as soon as it has started")

    def kill(self, process: WarmProcess, box: Box) -> None:
        """Kill a box, if its process is alive."""
        with self._lock:
            if process is self._process and not self._closed:
                try:
                    process.kill(box)
                    process.drain()
                except SandboxError:  # box is gone, too
                    process.end()
                    self._process = None
            box.channel.close()

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

    def run(self, code: str, *, deadline_s: float | None = None) -> Outcome:
        """Run an input; `output` is what it prints, the value of a last expression, or the error that it raises.

        "timeout" and "crash" say that it was killed or has died; "lost" that the interpreter is gone, with all names,
        and the next input begins with none.

        Raises:
            SandboxError: there is no sandbox.
        """
        with self._host.turns:
            if self._held is None:
                self._held = self._host.open()
            _, box = self._held
            began, seconds = time.monotonic(), deadline_s or self._host.limits.deadline_s
            reply, late = _ask(box, {"code": code, "limit": self._host.limits.output_kb << 10}, seconds), False
            if reply is None:
                reply, late = _ask(box, {"stop": True}, REAP_S), True
            passed = time.monotonic() - began
        if not isinstance(reply, dict) or not reply:
            self.close()
            return Outcome("lost", error="the interpreter was lost, and all names with it", seconds=passed)
        if "output" in reply:
            output = str(reply["output"])[: self._host.limits.output_kb << 10]
            return Outcome("done", passed=True, output=output, seconds=passed)
        if late:
            return Outcome("timeout", error=f"not done after {seconds:g} s", seconds=passed)
        return Outcome("crash", error="the input has ended the process that ran it", seconds=passed)

    @override
    def close(self) -> None:
        """Kill the interpreter and all that it has started."""
        if self._held is not None:
            self._host.kill(*self._held)
            self._held = None


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
