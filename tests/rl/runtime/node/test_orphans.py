"""Roles that have lost their driver or their Ray are orphans; other processes are left alone."""

import dataclasses
import os
from typing import Any

import pytest

from rl.runtime.node.orphans import _is_orphan
from rl.runtime.node.warm import NAME


@dataclasses.dataclass
class Process:
    """The facts about a process that are asked for."""

    title: str
    above: "Process | None" = None
    pid: int = -1

    def name(self) -> str:
        return self.title

    def cmdline(self) -> list[str]:
        return [self.title]

    def parent(self) -> "Process | None":
        return self.above

    def ppid(self) -> int:
        assert self.above is not None
        return self.above.pid


DRIVER, ANOTHER = Process("python", pid=os.getpid()), Process("python", pid=7)


@pytest.mark.parametrize(
    ("parent", "orphan"),
    [
        (None, True),
        (Process("init"), True),
        (Process("raylet", ANOTHER), False),
        (Process(NAME, ANOTHER), False),  # of a driver that is active, in the same process group
        (Process(NAME, DRIVER), True),  # its Ray has died, and ours is not started yet
        (Process(NAME, Process(NAME, DRIVER)), True),
        (Process(NAME, Process(NAME, ANOTHER)), False),
    ],
)
def test_a_role_is_an_orphan_without_what_started_it(parent: Process | None, orphan: bool) -> None:
    role: Any = Process("ray::RoleActor", parent, pid=5)
    assert _is_orphan(role, {5}, set()) is orphan
    assert not _is_orphan(role, {6}, set())
    assert not _is_orphan(Process("python", parent, pid=5), {5}, set())  # pyright: ignore[reportArgumentType]
