"""Folders of a process that was killed: the next start removes them, and those of no other."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from axlearn_like.run.scratch import make_scratch, scratch

OWNER = """
import sys, time
from axlearn_like.run.scratch import make_scratch
folder = make_scratch("warm", sys.argv[1])
(folder / "inner").mkdir()
(folder / "inner" / "file").write_text("x")
print(folder, flush=True)
time.sleep(60)
"""


def start(parent: Path) -> "tuple[subprocess.Popen[str], Path]":
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_has_left_is_removed_by_the_next_start(tmp_path: Path):
    killed, left = start(tmp_path)
    lives, used = start(tmp_path)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (left / "inner" / "file").exists()
        with scratch("warm", tmp_path) as own:
            assert not left.exists() and (used / "inner" / "file").exists()
            assert own.stat().st_mode & 0o777 == 0o700
        assert list(tmp_path.iterdir()) == [used]
    finally:
        lives.kill()
        lives.wait()


def test_a_pid_that_is_used_again_is_another_process_and_what_is_not_seen_is_left_alone(tmp_path: Path):
    own = make_scratch("warm", tmp_path)
    pid, started, space, random = own.name.removeprefix("axl-warm-").split("-")
    again = own.with_name(f"axl-warm-{pid}-{int(started) + 1}-{space}-x")
    elsewhere = own.with_name(f"axl-warm-{pid}-{int(started) + 1}-{int(space) + 1}-x")  # of a container
    others = [
        own.with_name(name)
        for name in ("axl-warm-x-1-2-3", "axl-warm-", f"axl-box-{pid}-1-{space}-x", "axl-warm-1-1-1")
    ]
    link, target = own.with_name(f"axl-warm-{pid}-1-{space}-y"), tmp_path / "thesis"
    for path in (again, elsewhere, *others, target):
        path.mkdir()
    link.symlink_to(target)
    with scratch("warm", tmp_path):
        assert not again.exists()
        assert all(path.exists() for path in (own, elsewhere, *others, link, target)) and random


def test_a_process_that_cannot_be_seen_any_more_has_no_start(tmp_path: Path):
    pid = subprocess.Popen(["true"])
    pid.wait()
    left = make_scratch("warm", tmp_path)
    gone = left.rename(left.with_name(left.name.replace(f"-{os.getpid()}-", f"-{pid.pid}-")))
    make_scratch("warm", tmp_path)
    assert not gone.exists()
