import subprocess
import sys

import pytest

from axlearn_like.operations.watchdog import EXIT_CODE, Watchdog
from axlearn_like.run.metrics import read_rows
from mesh.errors import UserError
from tests.elsewhere import ROOT


def watched(run_dir, exit_after, hangs):
    words = [sys.executable, "-m", "tests.axlearn_like.operations.watched", str(run_dir), str(exit_after), str(hangs)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_hang_is_written_down_and_then_ended(tmp_path):
    done = watched(tmp_path, 0.5, 100)
    assert done.returncode == EXIT_CODE, done.stderr
    assert "ended by itself" not in done.stdout
    for told in (done.stderr, (tmp_path / "stacks.txt").read_text()):
        assert "nothing completed for" in told and "after step 7, during input" in told
        assert "in hang_in_this_function" in told
    rows = [(row["event"], row["what"], row["step"], row["during"]) for row in read_rows(tmp_path / "events.jsonl")]
    assert rows == [("watchdog", "stacks", 7, "input"), ("watchdog", "exit", 7, "input")]


def test_one_that_goes_on_after_all_is_left_alone(tmp_path):
    done = watched(tmp_path, 0, 1.2)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ended by itself\n"
    rows = [row["what"] for row in read_rows(tmp_path / "events.jsonl")]
    assert rows[0] == "stacks" and "exit" not in rows
    assert rows.count("stacks") == 1  # once for each hang, and never while it started


def test_limits_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(UserError, match="Watchdog.dump_after: expected seconds, more than 0, got 0"):
        Watchdog.Config(dump_after=0.0).build(run_dir=tmp_path, events=None, doing=None)
