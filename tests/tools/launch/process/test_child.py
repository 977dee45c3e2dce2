"""A command of a launched process: its log, its exit status, SIGTERM."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.launch.process.started import start


def test_a_command_gets_its_rank_and_leaves_its_log_and_status(tmp_path: Path):
    code = "import sys; print(sys.argv[1:]); sys.exit(3)"
    done = start(
        tmp_path,
        *("train", "--hosts", "4", "--slices", "2", "--meet", "first:8490", "--", sys.executable, "-c", code),
        JOB_COMPLETION_INDEX="3",
        AXL_SLICE="1",
    )
    output, _ = done.communicate(timeout=60)
    assert done.returncode == 3
    log = tmp_path / "launch" / "logs" / "run-trainer-7.log"
    assert log.read_text() == "['--processes', '8', '--process', '7', '--meet', 'first:8490']\n"
    assert log.read_text() in output
    assert json.loads(log.with_suffix(".exit.json").read_text())["status"] == 3


@pytest.mark.parametrize(("status", "expected"), [(0, 143), (2, 2)])
def test_a_process_that_was_stopped_is_not_complete_though_its_command_saved_and_ended_with_0(
    status: int, expected: int, tmp_path: Path
):
    code = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit({status})))
print("ready", flush=True)
time.sleep(60)
"""
    running = start(tmp_path, "train", "--", sys.executable, "-c", code)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=60)
    assert (running.returncode, output) == (expected, "saved\n")


def test_a_signal_that_does_not_interrupt_the_wait_is_passed_on_all_the_same(tmp_path: Path):
    """Send it to another thread, which has the effect of a signal that comes just before the wait begins."""
    code = """
import os, pathlib, signal, sys, threading, time
from tools.launch.process.child import StopSignals, run_command

def strike():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=strike).start()
command = [sys.executable, "-c", "import time; time.sleep(60)"]
sys.exit(run_command(command, pathlib.Path(sys.argv[1]), os.environ, StopSignals()))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], timeout=30)
    assert done.returncode == 128 + signal.SIGTERM


def ends(run_dir: Path, code: str, **variables: str) -> tuple[int, str]:
    done = start(run_dir, "train", "--", sys.executable, "-c", code, **variables)
    output, _ = done.communicate(timeout=60)
    return done.returncode, output


FAILS = "import os, sys; print('12:30:01 pid', os.getpid()); sys.exit('no such data: rows')"


def test_a_command_that_fails_the_same_way_three_times_is_not_started_again(tmp_path: Path):
    """The record is in the storage: the attempts may be on other machines; a new submission has three again."""
    found = [ends(tmp_path, FAILS) for _ in range(4)]
    assert [status for status, _ in found] == [1, 1, 2, 1]
    reason = "axl: failed 3 times in the same way, with status 1, and is not started again: "
    assert reason in found[2][1] and found[2][1].endswith("| no such data: rows\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import sys, time; sys.exit(f'failed at {time.time()}')",  # in another way each time
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",  # a machine that is taken away
        "import sys; sys.exit(75)",  # the watchdog's
        "import sys; sys.exit('UNAVAILABLE: Task 3 was lost')",  # another machine was taken away
        "import pathlib, sys; p = pathlib.Path('at'); n = int(p.read_text()) + 1 if p.exists() else 0\n"
        "p.write_text(str(n)); print(f'trainer: step {n} of 100, 3 s'); sys.exit('a bad row')",
        "import pathlib, sys; p = pathlib.Path('metrics.jsonl'); n = p.read_text().count('x') if p.exists() else 0\n"
        "p.open('a').write('{\"x\": 0, \"step\": %d}\\n' % n); sys.exit('a bad row')",  # its progress is not shown yet
    ],
)
def test_a_command_that_makes_progress_or_was_taken_away_is_started_for_ever(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    assert 2 not in [ends(tmp_path, code)[0] for _ in range(4)]


def test_a_command_that_lasts_before_it_fails_is_started_for_ever(tmp_path: Path):
    lasts = "import tools.launch.process.repeats as one, sys; one.AT_ONCE = 0.0\n"
    lasts += "from tools.launch.process.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", lasts, "train", "--name", "x", "--run-dir", str(tmp_path), "--"]
    command += [sys.executable, "-c", FAILS]
    assert [subprocess.run(command, check=False, timeout=60).returncode for _ in range(4)] == [1] * 4
