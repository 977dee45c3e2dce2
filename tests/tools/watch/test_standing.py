"""How runs stand: of real ones that run, are killed, stopped and finished; and lists of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from rl.runtime.run import RLRun
from tests.axlearn_like.tiny import ROOT, run_in_process
from tests.rl.tiny import tiny_experiment
from tests.tools.report.made_up_run import write_run
from tools.cli import main
from tools.report import load_run
from tools.watch.listing import read_standing, size
from tools.watch.standing import Standing, standing

HOUR = 3600.0


@contextlib.contextmanager
def stopped_in_the_middle(run_dir: Path, step: int = 5) -> Iterator[subprocess.Popen[bytes]]:
    """A real training process that has stopped itself (SIGSTOP) after a step: it is alive and does nothing."""
    code = f"from tests.axlearn_like.tiny import run_and_print as run; run({str(run_dir)!r}, 12)"
    tiny = {"TINY_STEP": str(step), "TINY_SIGNAL": str(int(signal.SIGSTOP)), "TINY_AWAIT": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **tiny})
    try:
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert process.poll() is None
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


def both(path: Path) -> Standing:
    """How a run stands by all its rows, and by the ends of its logs: the same."""
    whole = standing(load_run(path))
    assert read_standing(path) == whole
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("ended", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_supervised_run_runs_dies_is_stopped_and_finishes(
    ended: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stop and finish with --full alone: the next test does both to a run of RL."""
    run = tmp_path / "runs" / "tiny"
    with stopped_in_the_middle(run) as process:
        found = both(run)
        assert (found.state, found.why) == ("running", f"process {process.pid}")
        logged = read_rows(run / "metrics.jsonl")[-1]["step"]
        assert found.progress == f"{logged} of 12" and found.step in (4, 5)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        died = both(run)
        assert (died.state, died.words) == ("died", f"died at step {logged}") and str(process.pid) in died.why
    assert main(["runs", str(tmp_path / "runs")]) == 0
    listing = capsys.readouterr().out
    assert f"died at step {logged}" in listing and "loss " in listing and f"{logged} of 12" in listing
    assert main(["watch", "--once", str(run)]) == 0
    assert f"died at step {logged}" in capsys.readouterr().out.replace("\n", " ")
    if not ended:
        return
    run_in_process(run, 12, step=8, signum=signal.SIGTERM)
    assert (both(run).state, both(run).why) == ("stopped", "by SIGTERM")
    run_in_process(run, 12)
    assert (both(run).state, both(run).progress) == ("finished", "12 of 12")


@pytest.mark.slow
def test_an_rl_run_is_running_then_stopped_then_finished(tmp_path: Path) -> None:
    job, seen = RLRun(tiny_experiment(num_steps=3).build(), say=lambda line: None), list[Standing]()

    def stop() -> bool:
        if (tmp_path / "metrics.jsonl").exists():
            seen.append(both(tmp_path))
        return bool(seen and seen[-1].step == 1)

    assert job.run(tmp_path, runtime="inprocess", stop=stop) is None
    assert (seen[-1].state, seen[-1].why, seen[-1].phase) == ("running", f"process {os.getpid()}", "rl")
    assert (both(tmp_path).state, both(tmp_path).progress) == ("stopped", "1 of 3")
    assert job.run(tmp_path, runtime="inprocess") is not None
    assert (both(tmp_path).state, both(tmp_path).progress) == ("finished", "3 of 3")


def test_a_run_of_another_machine_is_alive_as_long_as_it_logs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "far", finished=False)
    (run / "run.lock").write_text(json.dumps({"pid": 7, "host": "elsewhere", "started": None}))
    seen = standing(load_run(run)).seen
    assert seen is not None
    assert standing(load_run(run), seen + 60).state == "running"
    silent = standing(load_run(run), seen + HOUR)
    assert silent.state == "silent" and "elsewhere" in silent.why and "1 h 00 min" in silent.why


def test_a_run_between_its_phases_has_no_steps_of_another_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", steps=0, finished=False)
    (run / "config.txt").write_text("x:X\nnum_steps: 9\nprompts_per_step: 4\nwarm_start.num_steps: 200\n")
    (run / "run.lock").write_text(json.dumps({"pid": 1 << 30, "host": os.uname().nodename, "started": "1"}))
    assert (both(run).phase, both(run).progress, both(run).words) == ("sft", "199 of 200", "died at step 199")
    for phase, progress, words in (("eval_before", "", "died in eval_before"), ("rl", "0 of 9", "died at step 0")):
        EventLog(run / "events.jsonl").append("driver", "phase_begin", phase=phase)
        assert (both(run).phase, both(run).progress, both(run).words) == (phase, progress, words)


def test_a_lock_of_a_process_whose_number_is_another_ones_now_is_no_life(tmp_path: Path) -> None:
    run = write_run(tmp_path / "reused", finished=False)
    lock = {"pid": os.getpid(), "host": os.uname().nodename, "started": "1"}
    (run / "run.lock").write_text(json.dumps(lock))
    assert standing(load_run(run)).state == "died"


@pytest.mark.parametrize("lock", ["", "{", "[]", '{"pid": "x", "host": [], "started": {}}', "\0" * 99])
def test_what_is_no_lock_is_none(tmp_path: Path, lock: str) -> None:
    run = write_run(tmp_path / "odd", finished=False)
    (run / "run.lock").write_text(lock)
    assert both(run).state == "stopped"


@pytest.mark.slow
def test_two_hundred_runs_are_listed_for_less_than_reading_twenty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seconds of two pieces of work, compared: a bound in seconds fails on a slow or a busy machine."""
    made = write_run(tmp_path / "sweep" / "000")
    for index in range(1, 200):
        other = tmp_path / f"sweep{index % 3}" / f"{index:03d}"
        other.mkdir(parents=True)
        for part in made.iterdir():
            if part.is_file():
                os.link(part, other / part.name)
    (tmp_path / "notes").mkdir()
    began = time.process_time()
    assert main(["runs", str(tmp_path)]) == 0
    listed = time.process_time()
    for _ in range(20):
        load_run(made)
    assert listed - began < time.process_time() - listed
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 201 and all("319" in line for line in lines[1:])


def test_the_size_counts_a_file_of_two_names_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    before = size(run)
    os.link(run / "metrics.jsonl", run / "kept.jsonl")
    assert size(run) == before > 1000
    assert before == sum(
        path.stat().st_size for path in {*run.rglob("*.*")} if path.is_file() and path.name != "kept.jsonl"
    )
