"""A role that gets SIGTERM hands back or saves its work, logs it, and exits with status 0 in time."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.run.metrics import read_rows
from tests.elsewhere import ROOT

ROLE = """
import sys, time
from axlearn_like.run.events import EventLog
from rl.runtime.ray.shutdown import GracefulShutdown

path, kind = sys.argv[1:]
events = EventLog(path)
shutdown = GracefulShutdown("role", events, grace=0.2 if kind in ("late", "stuck") else 60.0)
shutdown.has_loop = kind != "no loop"
shutdown.abandon = lambda: events.append("role", "abandoned") if kind == "late" else time.sleep(1e6)
print("ready", flush=True)
while not (shutdown.requested and kind == "polite"):
    time.sleep(0.01)
shutdown.done(step=7)
time.sleep(1e6)  # like Ray's own threads
"""


def leave(tmp_path: Path, kind: str, signals: int = 1) -> list[dict[str, Any]]:
    """Return the events of a process that got SIGTERM and exited with status 0."""
    path = tmp_path / "events.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", ROLE, str(path), kind], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
    return [{name: row[name] for name in row if name not in ("time", "pid", "seconds")} for row in read_rows(path)]


@pytest.mark.parametrize("signals", [1, 3])
def test_a_loop_ends_by_itself_and_the_process_after_it(tmp_path: Path, signals: int) -> None:
    assert leave(tmp_path, "polite", signals) == [{"role": "role", "event": "shutdown", "step": 7}]


def test_without_a_loop_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    assert leave(tmp_path, "no loop") == [{"role": "role", "event": "shutdown"}]


def test_when_the_grace_is_over_the_work_is_abandoned_and_the_process_ends(tmp_path: Path) -> None:
    left = {"role": "role", "event": "shutdown", "abandoned": True}
    assert leave(tmp_path, "late") == [{"role": "role", "event": "abandoned"}, left]


def test_an_abandon_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    assert leave(tmp_path, "stuck") == [{"role": "role", "event": "shutdown", "abandoned": True}]
