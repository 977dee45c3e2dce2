"""The disk of the run directory is full in the middle of a run; when there is room again, the same command resumes.

A small file system in a mount namespace of its own, which needs no privileges where user namespaces are permitted.
"""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl.audit.invariants import check_run
from tests.benches.recovery.compare import compare, make_undisturbed
from tests.benches.recovery.run import ROOT
from tests.chaos.experiments import calm

STEPS = 40
SCRIPT = """
set -e
mount -t tmpfs -o size=700k tmpfs "$1"
set +e
shift
"$@" > "$OUT/first.txt" 2>&1; echo $? > "$OUT/first.status"
mount -o remount,size=64m "$DISK"
"$@" > "$OUT/second.txt" 2>&1; echo $? > "$OUT/second.status"
cp -r "$DISK/run" "$OUT/run"
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of the two commands: with little room, and with enough."""

    path: Path

    def status(self, which: str) -> int:
        return int((self.path / f"{which}.status").read_text())

    def said(self, which: str) -> str:
        return (self.path / f"{which}.txt").read_text()


def permitted() -> bool:
    """Return True if a file system can be mounted here without privileges."""
    if shutil.which("unshare") is None:
        return False
    trial = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /mnt"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run both commands, all roles in one process."""
    if not permitted():
        pytest.skip("no file systems of one's own here (user namespaces)")
    folder = tmp_path_factory.mktemp("disk")
    disk = folder / "small"
    disk.mkdir()
    words = [sys.executable, "-m", "tools.cli", "rl", "tests.chaos.experiments:endless", "--runtime", "inprocess"]
    words += ["--set", f"num_steps={STEPS}", "--run-dir", str(disk / "run")]
    command = ["unshare", "-rm", "env", f"OUT={folder}", f"DISK={disk}", "sh", "-c", SCRIPT, "sh", str(disk), *words]
    subprocess.run(command, cwd=ROOT, check=True, timeout=800)
    return Outcome(folder)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_when_there_is_room_again_the_same_command_resumes_to_the_same_result(outcome: Outcome, tmp_path) -> None:
    assert outcome.status("first") != 0 and "no space left on device" in outcome.said("first")
    assert outcome.status("second") == 0, outcome.said("second")
    assert compare(outcome.path / "run", make_undisturbed(tmp_path / "calm", calm(STEPS)), STEPS)["bit_identical"]
    assert [line for finding in check_run(outcome.path / "run") for line in finding.broken] == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_full_disk_is_one_message_that_names_it(outcome: Outcome) -> None:
    assert outcome.status("first") == 2
    progress = ("run directory: ", "reinforcement", "rl: ", "alarm ")
    said = [line for line in outcome.said("first").splitlines() if not line.startswith(progress)]
    [message] = said
    where = r"/run/(checkpoints/rl|metrics\.jsonl|events\.jsonl)"
    expected = rf"axl: error: no space left on device: .*{where}; free some and run the same command again: "
    assert re.fullmatch(expected + r"it resumes from update \d+", message)


def test_a_row_of_the_event_log_torn_by_a_full_disk_does_not_prevent_a_restart(tmp_path: Path) -> None:
    from axlearn_like.run.events import EventLog
    from axlearn_like.run.jsonl import JsonlTail
    from axlearn_like.run.metrics import read_rows

    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "role": "trainer", "ev')  # as far as there was room
    EventLog(path).append("driver", "session", pid=1, group=1)
    EventLog(path).append("trainer", "start", pid=2)
    assert [row["event"] for row in read_rows(path)][-1] == "start"
    assert [row["event"] for row in JsonlTail(path).new_rows()][-1] == "start"
