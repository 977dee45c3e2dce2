import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail
from axlearn_like.run.metrics import MetricsWriter, newest_rows, read_rows
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


@given(st.lists(st.tuples(st.sampled_from(["sft", "rl"]), st.integers(1, 3)), max_size=20), st.integers(0, 9))
def test_rows_beyond_a_step_are_dropped_wherever_they_stand(tmp_path_factory, gaps, resume):
    path, steps, rows = tmp_path_factory.mktemp("run") / "metrics.jsonl", {"sft": 0, "rl": 0}, []
    for phase, gap in gaps:
        steps[phase] += gap
        rows.append({"phase": phase, "step": steps[phase]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    MetricsWriter(path.parent, phase="rl", resume_step=resume).close()
    kept = [row for row in rows if row["phase"] == "sft" or row["step"] <= resume]
    assert read_rows(path) == kept
    assert newest_rows(path, "rl", count=2) == [row for row in kept if row["phase"] == "rl"][-2:]


def test_a_row_without_the_end_of_its_line_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"phase": "sft", "step": 1}\n{"phase": "sft", "step": 2}')
    MetricsWriter(tmp_path).write(3, {})
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_only_rows_of_some_events_are_parsed(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "a"}\n{"event": }\n{"event": "b", "of": "a"}\n{"event":"a"}\n')
    assert read_rows(path, ["a"]) == [{"event": "a"}, {"event": "a"}]
    with pytest.raises(UserError, match="line 2"):
        read_rows(path)
    path.write_text('{"event": "b"}\n{"event": "a", }\n')
    with pytest.raises(UserError, match="line 2"):
        read_rows(path, ["a"])


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


def test_progress_may_have_more_steps_than_it_began_with():
    stream, bar = io.StringIO(), Terminal()
    for shown in (stream, bar):
        with Progress(3, title="rl", every_seconds=1e9, stream=shown) as progress:
            progress.update(2)
            progress.extend(4)
            progress.update(7)
    assert stream.getvalue().splitlines()[-1].startswith("rl: step 7 of 7") and "7/7" in bar.getvalue()


def test_time_left_does_not_count_start_up_and_compilation(monkeypatch):
    """The demo compiles a second program at its fourth update: the first estimate was ten times the run's time."""
    now, stream = [0.0], io.StringIO()
    monkeypatch.setattr("axlearn_like.run.progress.time.monotonic", lambda: now[0])
    compiling = {51: 3_600.0, 54: 13.0}  # after a resume; others take 0.5 seconds, every tenth 3.5
    with Progress(100, start=50, title="rl", every_seconds=0.0, stream=stream) as progress:
        for step in range(51, 101):
            now[0] += compiling.get(step, 3.5 if step % 10 == 0 else 0.5)
            progress.update(step)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "rl: step 51 of 100" and lines[-1] == "rl: step 100 of 100"
    told = {int(line.split()[2]): float(line.split()[-3]) for line in lines if line.endswith(" s left")}
    assert min(told) == 54 and told[54] == 23  # truly 37, of which 15 are the pauses that are to come
    truth = {step: (100 - step) * 0.5 + 3 * (10 - step // 10) for step in told}
    assert all(abs(told[step] - truth[step]) < 3 + 0.3 * truth[step] for step in told if step >= 66)


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
