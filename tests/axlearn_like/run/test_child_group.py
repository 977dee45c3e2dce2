"""Children with a group of their own end with their parent, even one that is killed; nobody starts them otherwise."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from axlearn_like.run.child_group import ChildGroup
from tests.test_floors import FLOORS, ROOT

# Starts a child, which starts a grandchild; prints both, and waits.
PARENT = """
import sys, time
from axlearn_like.run.child_group import ChildGroup
child = ChildGroup([sys.executable, "-c", sys.argv[1]], grace=float(sys.argv[2]))
time.sleep(600)
"""
CHILD = """
import os, signal, subprocess, sys, time
{first}
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({file!r} + ".new", "w").write(f"{{os.getpid()}} {{other.pid}}")
os.rename({file!r} + ".new", {file!r})
while True:
    time.sleep(600)
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(done: object, seconds: float = 20.0) -> None:
    assert callable(done)
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("first", ["", DEAF], ids=["obedient", "deaf"])
def test_child_and_grandchild_end_with_a_killed_parent(tmp_path: Path, signum: signal.Signals, first: str):
    file = tmp_path / "pids"
    child = CHILD.format(first=first, file=str(file))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, child, "0.5"])
    wait_until(file.exists)
    pids = [int(word) for word in file.read_text().split()]
    parent.send_signal(signum)
    parent.wait()
    try:
        wait_until(lambda: all(map(gone, pids)))
    finally:
        for pid in pids:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


def guards() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "axl-guard" in child.cmdline()]


def test_a_child_that_has_ended_leaves_no_guard_and_its_status_is_as_ever():
    before = len(guards())
    with ChildGroup([sys.executable, "-c", "import sys; sys.exit(7)"]) as child:
        assert child.wait(20) == 7
    assert len(guards()) == before
    child = ChildGroup([sys.executable, "-c", "import time; time.sleep(600)"])
    assert child.poll() is None and len(guards()) == before + 1 and os.getpgid(child.pid) == child.pid
    child.kill_group()
    assert child.poll() == -signal.SIGKILL and len(guards()) == before


# Places that start a session in another way, each with what ends it.
KNOWN = {
    "axlearn_like/run/child_group.py": "the helper itself",
    "rl/verification/sandbox/warm_process.py": "its control socket is closed; tests/rl/verification/sandbox",
    "rl/verification/worker_process.py": "`die_with_parent` in the process",
    "tools/launch/local/client.py": "the local cluster, which outlives the command",
}


def test_no_other_place_starts_a_session_of_its_own():
    starts = re.compile(r"start_new_session|\bsetsid\b|process_group=")
    found = {
        path.relative_to(ROOT).as_posix()
        for room in FLOORS
        for path in (ROOT / room).rglob("*.py")
        if starts.search(path.read_text(encoding="utf-8"))
    }
    inside = ("rl/verification/sandbox/attacks/", "rl/verification/sandbox/zygote.py")  # within a box
    assert {path for path in found if not path.startswith(inside)} == KNOWN.keys()
