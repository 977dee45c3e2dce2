"""The members of an elastic run as processes of this machine: started, and started again when they end."""

import dataclasses
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from axlearn_like.elastic.coordinator import Coordinator
from axlearn_like.elastic.membership import MemberTimeouts
from axlearn_like.run.child_group import ChildGroup
from axlearn_like.run.events import EventLog
from mesh.errors import UserError

VARIABLE = "AXL_MEMBER"  # names a member's place, for a process that is to be one
_AGAIN = 1.0  # seconds before a member that has ended is started again
_FRUITLESS = 3  # starts of a member in succession that may end without an update of the run
_GRACE = 20.0  # seconds for members to end after the run


@dataclasses.dataclass
class _Process:
    child: ChildGroup
    since: int  # updates of the run when it was started
    fruitless: int = 0
    again_at: float | None = None  # monotonic time of the next start


class MemberSupervisor:
    """Starts members, coordinates them, and replaces those that end."""

    def __init__(
        self,
        command: Sequence[str],
        members: int,
        events: EventLog,
        timeouts: MemberTimeouts,
        say: Callable[[str], None] = lambda line: None,
    ):
        """Prepare as many members, each a process of this command; `say` receives lines for people."""
        self._say = say
        self._command, self._count, self._events, self._key = command, members, events, secrets.token_hex(32)
        self._coordinator = Coordinator(members, self._key.encode(), events, timeouts, dropped=self._kill)
        self._processes: dict[int, _Process] = {}

    @property
    def pids(self) -> Mapping[int, int]:
        """The processes of the members."""
        return {index: process.child.pid for index, process in self._processes.items()}

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Return when all members have ended the run (UserError: one cannot be started)."""
        try:
            self._processes = {index: _Process(self._start(index), 0) for index in range(self._count)}
            while not self._coordinator.over.wait(0.1):
                if stopped():
                    self._coordinator.stop()
                for index, process in self._processes.items():
                    self._look_after(index, process)
            deadline = time.monotonic() + _GRACE
            while time.monotonic() < deadline and any(p.child.poll() is None for p in self._processes.values()):
                time.sleep(0.05)
        finally:
            self._coordinator.close()
            for process in self._processes.values():
                process.child.kill_group()

    def _look_after(self, index: int, process: _Process) -> None:
        if process.again_at is None and (status := process.child.poll()) is not None:
            process.fruitless = 0 if self._coordinator.updates > process.since else process.fruitless + 1
            self._events.append("trainer", "member_ended", member=index, pid=process.child.pid, status=status)
            self._say(f"member {index} (pid {process.child.pid}) has ended with status {status}; it starts again")
            if process.fruitless >= _FRUITLESS:
                raise UserError(f"member {index} has ended {_FRUITLESS} times without an update, at last by {status}")
            process.again_at = time.monotonic() + _AGAIN
        if process.again_at is not None and time.monotonic() >= process.again_at:
            process.since, process.again_at = self._coordinator.updates, None
            process.child = self._start(index)

    def _start(self, index: int) -> ChildGroup:
        place = json.dumps({"index": index, "address": self._coordinator.address, "key": self._key})
        return ChildGroup(self._command, env={**os.environ, VARIABLE: place})

    def _kill(self, index: int) -> None:
        """Kill a member that is excluded: it may hang."""
        if (process := self._processes.get(index)) is not None:
            process.child.kill_group()
