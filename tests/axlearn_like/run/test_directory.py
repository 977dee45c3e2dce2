import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from axlearn_like.run.directory import RunDirectory, RunDirectoryError
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows

CONFIG = "trainer: T\nlr: 0.1\nnum_steps: 10\n"


def contents(path: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_new_one_has_its_rooms_and_opens_again(tmp_path):
    with RunDirectory.open(tmp_path / "a" / "run", CONFIG) as run:
        assert run.config_path.read_text() == CONFIG
        assert run.checkpoints.is_dir() and run.rollouts.is_dir()
    with RunDirectory.open(tmp_path / "a" / "run", CONFIG) as run:
        assert run.path == tmp_path / "a" / "run"


def test_another_config_is_refused_with_the_lines_that_differ(tmp_path):
    RunDirectory.open(tmp_path, CONFIG).close()
    before = contents(tmp_path)
    with pytest.raises(RunDirectoryError) as error:
        RunDirectory.open(tmp_path, CONFIG.replace("num_steps: 10", "num_steps: 5"))
    assert "-num_steps: 10" in str(error.value)
    assert "+num_steps: 5" in str(error.value)
    assert "lr" not in str(error.value)
    assert contents(tmp_path) == before


def test_more_steps_extend_a_run_and_fewer_do_not(tmp_path):
    RunDirectory.open(tmp_path, "lr: 0.1\nnum_steps: 9\nseed: 0\n").close()
    with RunDirectory.open(tmp_path, "lr: 0.1\nnum_steps: 20\nseed: 0\n") as run:
        assert run.config_path.read_text() == "lr: 0.1\nnum_steps: 20\nseed: 0\n"
    for other in ("lr: 0.1\nnum_steps: 19\nseed: 0\n", "lr: 0.2\nnum_steps: 30\nseed: 0\n"):
        with pytest.raises(RunDirectoryError, match="another config"):
            RunDirectory.open(tmp_path, other)


def test_policies_may_come_and_go_where_there_are_several(tmp_path):
    two = "lr: 0.1\npolicies: {'a': {}, 'b': {'lr': 1}}\npolicy_shares: {}\npolicy.dim: 3\n"
    three = two.replace("{'a': {}", "{'a': {}, 'c': {}").replace("shares: {}", "shares: {'c': 2.0}")
    RunDirectory.open(tmp_path, two).close()
    with RunDirectory.open(tmp_path, three) as run:
        assert run.config_path.read_text() == three
    RunDirectory.open(tmp_path, two).close()
    for other in (two.replace("dim: 3", "dim: 4"), "lr: 0.1\npolicies: {}\npolicy_shares: {}\npolicy.dim: 3\n"):
        with pytest.raises(RunDirectoryError, match="another config"):
            RunDirectory.open(tmp_path, other)


def test_a_config_that_is_no_text_is_refused(tmp_path):
    RunDirectory.open(tmp_path, "lr: 0.1\n").close()
    (tmp_path / "config.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunDirectoryError, match="cannot read .*config.txt"):
        RunDirectory.open(tmp_path, "lr: 0.1\n")
    with pytest.raises(RunDirectoryError, match="cannot read .*config.txt"):
        RunDirectory.attach(tmp_path).read_config()
    with RunDirectory.open(tmp_path, "lr: 0.1\n", force=True) as run:
        assert run.read_config() == "lr: 0.1\n"


def test_force_takes_and_records_the_other_config(tmp_path):
    RunDirectory.open(tmp_path, CONFIG).close()
    with RunDirectory.open(tmp_path, "lr: 0.2\n", force=True) as run:
        assert run.config_path.read_text() == "lr: 0.2\n"


def test_force_takes_no_run_of_another_class(tmp_path):
    RunDirectory.open(tmp_path, "lab.runs:Trainer\nlr: 0.1\n").close()
    before = contents(tmp_path)
    with pytest.raises(RunDirectoryError, match="holds a run of Trainer, and this is one of RLExperiment, with which"):
        RunDirectory.open(tmp_path, "lab.runs:RLExperiment\nlr: 0.1\n", force=True)
    assert contents(tmp_path) == before


def test_a_file_in_the_way_and_a_foreign_directory_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunDirectoryError, match=f"{tmp_path / 'file'} is a file"):
        RunDirectory.open(tmp_path / "file", CONFIG)
    with pytest.raises(RunDirectoryError, match="no config.txt but holds file"):
        RunDirectory.open(tmp_path, CONFIG)
    with pytest.raises(RunDirectoryError, match="cannot make run directory"):
        RunDirectory.open(tmp_path / "file" / "below", CONFIG)
    assert contents(tmp_path) == {str(tmp_path / "file"): b"mine"}


def test_a_directory_with_logs_of_a_launch_alone_is_new(tmp_path):
    (tmp_path / "launch" / "logs").mkdir(parents=True)
    RunDirectory.open(tmp_path, CONFIG).close()


def test_a_place_that_cannot_be_written_is_refused():
    with pytest.raises(RunDirectoryError, match="cannot make run directory /proc/run"):
        RunDirectory.open("/proc/run", CONFIG)  # not even root may


HOLD = """
import sys
from axlearn_like.run.directory import RunDirectory
run = RunDirectory.open(sys.argv[1], sys.argv[2])
print("open", flush=True)
sys.stdin.read()
"""


def test_a_live_run_is_refused_and_a_killed_one_is_taken_over(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), CONFIG],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout and child.stdout.readline() == "open\n"
        with pytest.raises(RunDirectoryError, match=f"in use by process {child.pid}"):
            RunDirectory.open(tmp_path, CONFIG)
    finally:
        child.kill()
    # Dead, though still a zombie until it is waited for.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    RunDirectory.open(tmp_path, CONFIG).close()
    child.communicate()


def test_a_process_number_used_again_does_not_keep_the_lock(tmp_path):
    run = RunDirectory.open(tmp_path, CONFIG)
    with pytest.raises(RunDirectoryError, match="in use"):
        RunDirectory.open(tmp_path, CONFIG)
    text = run.lock_path.read_text()
    started = text.split('"started": "')[1].split('"')[0]
    run.lock_path.write_text(text.replace(started, "1"))  # same number, another process
    RunDirectory.open(tmp_path, CONFIG).close()


def _append(path: Path, role: str, count: int) -> None:
    for index in range(count):
        EventLog(path).append(role, "update", index=index, note="x" * 200)


def test_several_processes_share_an_event_log(tmp_path):
    path = tmp_path / "events.jsonl"
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(_append, [path] * 2, ["worker-0", "worker-1"], [50] * 2))
    rows = read_rows(path)
    assert len(rows) == 100
    for role in ("worker-0", "worker-1"):
        assert [row["index"] for row in rows if row["role"] == role] == list(range(50))
