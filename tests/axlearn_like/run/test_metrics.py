import io

import numpy as np
import pytest

from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail
from axlearn_like.run.metrics import MetricsWriter, read_rows
from axlearn_like.run.progress import Progress
from mesh.errors import UserError


def test_rows_come_back_and_what_is_not_finite_is_null(tmp_path):
    writer = MetricsWriter(tmp_path, phase="rl")
    written = writer.write(3, {"loss": np.float32(0.5), "bad": float("nan"), "tokens": np.int32(7)})
    writer.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [written]
    assert written == {
        "phase": "rl",
        "step": 3,
        "time": written["time"],
        "loss": 0.5,
        "bad": None,
        "tokens": 7,
    }


def test_a_row_is_on_disk_before_the_writer_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"loss": 1.0})
    assert [row["step"] for row in read_rows(writer.path)] == [1]
    writer.close()


def test_a_torn_last_line_is_left_out_and_mended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"phase": "sft", "step": 1}\n{"phase": "sft", "st')
    assert [row["step"] for row in read_rows(path)] == [1]
    writer = MetricsWriter(tmp_path)
    writer.write(2, {})
    writer.close()
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def test_a_resume_drops_later_rows_of_its_own_phase_only(tmp_path):
    for phase, steps in (("sft", (1, 2, 3)), ("rl", (1, 2))):
        writer = MetricsWriter(tmp_path, phase=phase)
        for step in steps:
            writer.write(step, {})
        writer.close()
    MetricsWriter(tmp_path, phase="sft", resume_step=1).close()
    rows = [(row["phase"], row["step"]) for row in read_rows(tmp_path / "metrics.jsonl")]
    assert rows == [("sft", 1), ("rl", 1), ("rl", 2)]


def test_a_line_broken_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": }\n{"step": 3}\n')
    with pytest.raises(UserError, match="metrics.jsonl, line 2"):
        read_rows(path)


def test_progress_without_a_terminal_is_plain_lines():
    stream = io.StringIO()
    with Progress(3, title="sft", every_seconds=1e9, stream=stream) as progress:
        for step in (1, 2, 3):
            progress.update(step, loss=0.25, tokens=100)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2  # the first and the last
    assert lines[0] == "sft: step 1 of 3, loss 0.2500"  # no speed yet: before it lie start-up and compilation
    assert lines[1].startswith("sft: step 3 of 3, loss 0.2500, ") and lines[1].endswith(" tok/s")
    assert "\x1b" not in stream.getvalue()


def test_time_left_does_not_count_start_up_and_compilation(monkeypatch):
    """The second update compiles, too; before, it made a first estimate of ten times the run's time."""
    now = [0.0]
    monkeypatch.setattr("axlearn_like.run.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    with Progress(100, start=50, title="rl", every_seconds=0.0, stream=stream) as progress:
        for step, seconds in enumerate((3_600.0, 250.0, 50.0, 50.0, 80.0), start=51):  # after a resume
            now[0] += seconds
            progress.update(step)
    *early, fourth, fifth = stream.getvalue().splitlines()
    assert early == [f"rl: step {step} of 100" for step in (51, 52, 53)]
    assert (fourth, fifth) == ("rl: step 54 of 100, 2,300 s left", "rl: step 55 of 100, 2,700 s left")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar():
    stream = Terminal()
    with Progress(3, title="sft", stream=stream) as progress:
        progress.update(3, loss=0.25, tokens=100)
    assert "3/3" in stream.getvalue()
    assert "loss 0.2500" in stream.getvalue()


def test_a_row_that_a_full_disk_has_torn_is_left_out_and_those_behind_it_are_read(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "first"}\n{"time": 1.0, "role": "trainer", "ev')  # as far as there was room
    tail = JsonlTail(path)
    assert [row["event"] for row in tail.new_rows()] == ["first"]
    for event in ("second", "third"):
        EventLog(path).append("driver", event)
    assert [row["event"] for row in read_rows(path)] == ["first", "second", "third"]
    assert [row["event"] for row in tail.new_rows()] == ["second", "third"]
